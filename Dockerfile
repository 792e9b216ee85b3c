# Two stages: a build with the toolchain, and an image with nothing but the program.
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --release --locked && cp target/release/smart-router /smart-router

FROM gcr.io/distroless/cc-debian12:nonroot
COPY --from=build /smart-router /smart-router
USER 65532:65532
EXPOSE 8080 9090
ENTRYPOINT ["/smart-router"]
