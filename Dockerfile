# Two stages: a build with the toolchain, and an image with nothing but the program and the
# certificates of public authorities. deploy/image/oci_image.py assembles the same image without a
# daemon.
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
RUN cp "$(deploy/image/static.sh --release)" /smart-router

FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /smart-router /smart-router
USER 65532:65532
EXPOSE 8080 9090
ENTRYPOINT ["/smart-router"]
