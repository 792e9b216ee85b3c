//! The Lua scripts, one per operation, joined at build time.

use std::sync::LazyLock;

/// A script and the hash by which Redis knows it.
pub struct Script {
    /// The operation, as metrics call it.
    pub name: &'static str,
    pub code: &'static str,
    pub hash: String,
}

macro_rules! scripts {
    ($($constant:ident = $name:literal;)*) => {
        $(pub static $constant: LazyLock<Script> = LazyLock::new(|| {
            let code = include_str!(concat!(env!("OUT_DIR"), "/", $name, ".lua"));
            Script { name: $name, code, hash: redis::Script::new(code).get_hash().to_owned() }
        });)*
    };
}

scripts! {
    ADOPT_CALLS = "adopt_calls";
    ADOPT_PODS = "adopt_pods";
    ALLOCATE = "allocate";
    APPLY_TIERS = "apply_tiers";
    AUDIT_CALLS = "audit_calls";
    AUDIT_PODS = "audit_pods";
    AUDIT_POOL = "audit_pool";
    BEGIN = "begin";
    CALL = "call";
    DRAIN = "drain";
    MOVE_POD = "move_pod";
    OBSERVE_POD = "observe_pod";
    POD = "pod";
    PODS = "pods";
    POOL_LOAD = "pool_load";
    RELEASE = "release";
    REMOVE_POD = "remove_pod";
    RENEW = "renew";
    STATUS = "status";
    SWEEP = "sweep";
    UNDRAIN = "undrain";
}
