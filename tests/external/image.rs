//! The image: a static program, from scratch, without a daemon. The program is a debug build, which
//! takes a third of the time of a release build; `release.sh` packs a release build in the same way.

use std::{
    collections::BTreeSet,
    fs,
    net::{SocketAddr, UdpSocket},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
    thread,
    time::Duration,
};

use serde_json::{Value, json};
use testkit::{
    Connection, Process, certificates::Authority, eventually, free_port, redis::RedisServer,
    scratch,
};

const VERSION: &str = env!("CARGO_PKG_VERSION");
const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";
/// Everything that the image contains.
const FILES: [&str; 5] =
    ["etc", "etc/ssl", "etc/ssl/certs", "etc/ssl/certs/ca-certificates.crt", "smart-router"];

pub(crate) fn run(command: &mut Command) -> String {
    let output = command.current_dir(testkit::ROOT).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// The static program.
pub(crate) fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let path = run(&mut Command::new("deploy/image/static.sh"));
        // Without symbols it is half as large, and the tests pack it several times.
        let stripped = scratch().join("smart-router");
        run(Command::new("strip").arg("-o").arg(&stripped).arg(path.trim()));
        stripped
    })
}

fn assemble(output: &Path) {
    run(Command::new("deploy/image/oci_image.py")
        .arg("--program")
        .arg(program())
        .args(["--certificates", CERTIFICATES, "--version", VERSION])
        .args(["--architecture", "amd64", "--epoch", "1700000000", "--output"])
        .arg(output));
}

/// The image as an OCI archive.
fn archive() -> &'static Path {
    static ARCHIVE: OnceLock<PathBuf> = OnceLock::new();
    ARCHIVE.get_or_init(|| {
        let path = scratch().join("image.tar");
        assemble(&path);
        path
    })
}

fn skopeo() -> Command {
    let mut command = Command::new("skopeo");
    // The policy about signatures is that of the machine, and may be missing.
    command.arg("--insecure-policy");
    command
}

fn config_of(image: &str) -> Value {
    serde_json::from_str(&run(skopeo().args(["inspect", "--config", image]))).unwrap()
}

/// The file system of an image.
fn unpack(image: &str) -> PathBuf {
    let directory = scratch();
    let (layout, bundle) = (directory.join("layout"), directory.join("bundle"));
    let layout = layout.to_str().unwrap();
    run(skopeo().args(["copy", image, &format!("oci:{layout}:it")]));
    let mut umoci = Command::new("umoci");
    run(umoci.args(["unpack", "--rootless", "--image", &format!("{layout}:it")]).arg(&bundle));
    bundle.join("rootfs")
}

fn files(root: &Path) -> BTreeSet<String> {
    let list = run(Command::new("find").arg(root).args(["-mindepth", "1", "-printf", "%P\n"]));
    list.lines().map(str::to_owned).collect()
}

fn is_root() -> bool {
    run(Command::new("id").arg("-u")).trim() == "0"
}

/// The program of an unpacked image as its user, or as root of a user namespace.
fn in_image(root: &Path) -> Command {
    let mut command = if is_root() {
        let mut command = Command::new("chroot");
        command.arg("--userspec=65532:65532");
        command
    } else {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "chroot"]);
        command
    };
    let path = std::env::var_os("PATH").unwrap();
    command.arg(root).arg("/smart-router").env_clear().env("PATH", path);
    command
}

#[test]
fn the_program_needs_no_shared_library() {
    let headers =
        run(Command::new("readelf").args(["--program-headers", "--dynamic"]).arg(program()));
    assert!(!headers.contains("INTERP") && !headers.contains("(NEEDED)"), "{headers}");
}

#[test]
fn the_image_has_a_numeric_user_and_no_shell() {
    let image = format!("oci-archive:{}", archive().display());
    let config = config_of(&image);
    assert_eq!(config["os"], "linux");
    assert_eq!(config["architecture"], "amd64");
    assert_eq!(config["created"], "2023-11-14T22:13:20Z");
    let labels = config["config"]["Labels"].clone();
    assert_eq!(labels["org.opencontainers.image.version"], VERSION);
    assert_eq!(config["config"]["User"], "65532:65532");
    assert_eq!(config["config"]["Entrypoint"], json!(["/smart-router"]));
    assert_eq!(config["config"]["ExposedPorts"], json!({"8080/tcp": {}, "9090/tcp": {}}));
    let root = unpack(&image);
    assert_eq!(files(&root), FILES.map(str::to_owned).into());
    assert_eq!(fs::read(root.join("smart-router")).unwrap(), fs::read(program()).unwrap());
    // One layer, which is smaller than its content.
    let content = fs::metadata(program()).unwrap().len();
    let size = fs::metadata(archive()).unwrap().len();
    assert!(size < content, "{size} of {content} bytes");
}

#[test]
fn equal_inputs_give_equal_images() {
    let again = scratch().join("again.tar");
    let touched = Command::new("touch").arg(program()).status().unwrap();
    assert!(touched.success());
    assemble(&again);
    assert_eq!(fs::read(archive()).unwrap(), fs::read(again).unwrap());
}

/// buildah builds the last stage of the Dockerfile from the same files.
#[test]
fn the_dockerfile_describes_the_same_image() {
    let dockerfile = fs::read_to_string(Path::new(testkit::ROOT).join("Dockerfile")).unwrap();
    let stage = &dockerfile[dockerfile.rfind("FROM scratch").unwrap()..];
    let directory = scratch();
    let context = directory.join("context");
    fs::create_dir_all(context.join("etc/ssl/certs")).unwrap();
    fs::copy(CERTIFICATES, context.join(&CERTIFICATES[1..])).unwrap();
    fs::copy(program(), context.join("smart-router")).unwrap();
    fs::write(context.join("Containerfile"), stage.replace("--from=build ", "")).unwrap();
    let policy = directory.join("policy.json");
    fs::write(&policy, r#"{"default": [{"type": "insecureAcceptAnything"}]}"#).unwrap();
    let buildah = || {
        let mut command = Command::new("buildah");
        command.arg("--root").arg(directory.join("store")).arg("--runroot");
        command.arg(directory.join("run")).args(["--storage-driver", "vfs"]);
        command
    };
    let built = buildah()
        .args(["build", "--isolation", "chroot", "--tag", "it", "--signature-policy"])
        .arg(&policy)
        .arg(&context)
        .output()
        .expect("buildah is installed");
    let errors = String::from_utf8_lossy(&built.stderr);
    if !built.status.success() && errors.contains("ermission") {
        println!("this sandbox does not permit buildah: {errors}");
        return;
    }
    assert!(built.status.success(), "{errors}");
    let image = format!("oci-archive:{}", directory.join("image.tar").display());
    run(buildah().args(["push", "--signature-policy"]).arg(&policy).args(["it", &image]));
    let assembled = format!("oci-archive:{}", archive().display());
    let (built, expected) = (config_of(&image), config_of(&assembled));
    // buildah adds a PATH to the environment, which the program does not use.
    for field in ["User", "Entrypoint", "ExposedPorts", "Cmd"] {
        assert_eq!(built["config"][field], expected["config"][field], "{field}");
    }
    let root = unpack(&image);
    assert_eq!(files(&root), FILES.map(str::to_owned).into());
    assert_eq!(fs::read(root.join("smart-router")).unwrap(), fs::read(program()).unwrap());
}

/// Answers queries for one name with 127.0.0.1, and all others with NXDOMAIN, as the DNS of a
/// cluster does.
fn serve_dns(socket: UdpSocket, name: &'static str) {
    thread::spawn(move || {
        let mut query = [0; 512];
        while let Ok((length, client)) = socket.recv_from(&mut query) {
            let mut question = 12;
            let mut labels = Vec::new();
            while query[question] != 0 {
                let size = usize::from(query[question]);
                let label = &query[question + 1..question + 1 + size];
                labels.push(String::from_utf8_lossy(label).to_lowercase());
                question += size + 1;
            }
            let end = question + 5;
            assert!(end <= length);
            let known = labels.join(".") == name;
            let is_ipv4 = query[question + 2] == 1;
            let mut reply = query[..2].to_vec();
            reply.extend(if known { [0x81, 0x80] } else { [0x81, 0x83] });
            reply.extend([0, 1, 0, u8::from(known && is_ipv4), 0, 0, 0, 0]);
            reply.extend(&query[12..end]);
            if known && is_ipv4 {
                reply.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 5, 0, 4, 127, 0, 0, 1]);
            }
            socket.send_to(&reply, client).unwrap();
        }
    });
}

/// Starts the image, and waits until it is ready with its store.
fn starts(root: &Path, settings: &[(&str, &str)]) {
    let (api, metrics) = (free_port(), free_port());
    let mut command = in_image(root);
    command.env("HTTP_PORT", api.to_string()).env("METRICS_PORT", metrics.to_string());
    command.envs(settings.iter().copied()).env("LOG_LEVEL", "warn").stdout(Stdio::null());
    let _process = Process(command.spawn().unwrap());
    let address = SocketAddr::from(([127, 0, 0, 1], metrics));
    let get = |path: &str| Connection::try_open(address)?.try_get(path);
    eventually(Duration::from_secs(30), "the image answers /health", || {
        get("/health").is_some_and(|it| it.status == 200)
    });
    eventually(Duration::from_secs(30), "the store is up", || {
        get("/ready").is_some_and(|it| it.text().contains(r#""store":"up""#))
    });
}

/// A static glibc resolves names without the shared libraries of its name service: the modules for
/// files and DNS are part of it since 2.34.
#[test]
fn the_image_starts_and_resolves_names() {
    let root = unpack(&format!("oci-archive:{}", archive().display()));
    assert_eq!(run(in_image(&root).arg("--version")), format!("smart-router {VERSION}\n"));
    let server = RedisServer::start(&[]);
    // The kubelet mounts these files.
    fs::write(root.join("etc/hosts"), "127.0.0.1 localhost\n127.0.0.1 redis-by-file\n").unwrap();
    fs::write(root.join("etc/resolv.conf"), "nameserver 127.0.0.153\n").unwrap();
    let pods = ("PODS", "a=127.0.0.1:1");
    let url = format!("redis://redis-by-file:{}", server.port);
    starts(&root, &[("REDIS_URL", &url), pods]);

    let Ok(socket) = UdpSocket::bind("127.0.0.153:53") else {
        println!("port 53 is not permitted; DNS is not tested");
        return;
    };
    serve_dns(socket, "redis.voice.svc.cluster.local");
    let resolver = "search voice.svc.cluster.local svc.cluster.local cluster.local\n\
                    nameserver 127.0.0.153\noptions ndots:5\n";
    fs::write(root.join("etc/resolv.conf"), resolver).unwrap();
    let url = format!("redis://redis:{}", server.port);
    starts(&root, &[("REDIS_URL", &url), pods]);
}

/// TLS to Redis with an authority of the image's own file of certificates.
#[test]
fn the_image_trusts_its_certificates() {
    let root = unpack(&format!("oci-archive:{}", archive().display()));
    let authority = Authority::create();
    let (ca, certificate) = (authority.file(), authority.sign("redis"));
    let trusted = root.join(&CERTIFICATES[1..]);
    let mut certificates = fs::read_to_string(&trusted).unwrap();
    certificates += &fs::read_to_string(&ca).unwrap();
    fs::write(trusted, certificates).unwrap();
    fs::write(root.join("etc/hosts"), "127.0.0.1 localhost\n").unwrap();
    let port = free_port();
    let arguments =
        format!("--port 0 --tls-port {port} --save  --tls-auth-clients no --tls-ca-cert-file {ca}");
    let mut arguments: Vec<&str> = arguments.split(' ').collect();
    arguments.extend(["--tls-cert-file", &certificate.file, "--tls-key-file", &certificate.key]);
    let _server = RedisServer::start_raw(port, &arguments);
    let url = format!("rediss://localhost:{port}");
    starts(&root, &[("REDIS_URL", &url), ("PODS", "a=127.0.0.1:1")]);
}
