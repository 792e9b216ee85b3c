//! Which router a command talks to, and as whom.

use clap::Args;

use crate::{client::Client, secrets::Secret};

#[derive(Debug, Args)]
pub struct RouterArgs {
    /// The router
    #[arg(
        long,
        env = "SMART_ROUTER_URL",
        value_name = "URL",
        default_value = "http://localhost:8080"
    )]
    pub router: String,
    /// A token of its API, where it wants one
    #[arg(long, env = "SMART_ROUTER_TOKEN", value_name = "TOKEN")]
    token: Option<Secret>,
}

impl RouterArgs {
    pub fn client(&self) -> anyhow::Result<Client> {
        Client::new(&self.router, self.token.clone())
    }
}
