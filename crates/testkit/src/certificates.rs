//! Certificates, made by OpenSSL.

use std::{fs, path::PathBuf, process::Command};

use super::scratch;

/// A certificate authority of one test.
pub struct Authority {
    directory: PathBuf,
}

/// The files of a certificate and its key.
pub struct Certificate {
    pub file: String,
    pub key: String,
}

impl Authority {
    pub fn create() -> Self {
        let authority = Self { directory: scratch() };
        let (key, file) = (authority.at("ca.key"), authority.file());
        openssl(&format!(
            "req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {file} -days 2 -subj /CN=test \
             -addext basicConstraints=critical,CA:TRUE"
        ));
        authority
    }

    fn at(&self, name: &str) -> String {
        self.directory.join(name).to_str().unwrap().to_owned()
    }

    pub fn file(&self) -> String {
        self.at("ca.crt")
    }

    /// A certificate for localhost.
    pub fn sign(&self, name: &str) -> Certificate {
        self.sign_key(name, "rsa:2048")
    }

    /// A certificate for localhost with an ECDSA key, which most public authorities issue.
    pub fn sign_ecdsa(&self, name: &str) -> Certificate {
        self.sign_key(name, "ec -pkeyopt ec_paramgen_curve:prime256v1")
    }

    fn sign_key(&self, name: &str, kind: &str) -> Certificate {
        let [key, request, file, names] =
            ["key", "csr", "crt", "names"].map(|end| self.at(&format!("{name}.{end}")));
        fs::write(&names, "subjectAltName=DNS:localhost,IP:127.0.0.1").unwrap();
        openssl(&format!(
            "req -newkey {kind} -nodes -keyout {key} -out {request} -subj /CN={name}"
        ));
        let (ca, ca_key) = (self.file(), self.at("ca.key"));
        openssl(&format!(
            "x509 -req -in {request} -CA {ca} -CAkey {ca_key} -CAcreateserial -out {file} \
             -days 2 -extfile {names}"
        ));
        Certificate { file, key }
    }
}

fn openssl(args: &str) {
    let output = Command::new("openssl").args(args.split(' ').filter(|it| !it.is_empty())).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
