//! The Lua scripts, one per operation, joined at build time.

/// A script and the hash by which Redis knows it.
pub struct Script {
    /// The operation, as metrics call it.
    pub name: &'static str,
    pub code: String,
    pub hash: String,
}

macro_rules! scripts {
    ($($name:ident)*) => {
        /// All scripts of the store.
        pub struct Scripts {
            $(pub $name: Script,)*
        }

        impl Scripts {
            /// The scripts as they pass through `edit`, which is given the name and
            /// the code of each: tests break them on purpose.
            pub fn edited(edit: impl Fn(&str, &str) -> String) -> Self {
                Self {
                    $($name: {
                        let code = include_str!(concat!(env!("OUT_DIR"), "/", stringify!($name), ".lua"));
                        let code = edit(stringify!($name), code);
                        let hash = redis::Script::new(&code).get_hash().to_owned();
                        Script { name: stringify!($name), code, hash }
                    },)*
                }
            }

            pub fn all(&self) -> impl Iterator<Item = &Script> {
                [$(&self.$name,)*].into_iter()
            }
        }
    };
}

scripts! {
    adopt_calls adopt_pods allocate apply_tiers ask_again audit_calls audit_pods audit_pool begin call confirm drain
    epoch move_pod observe_pod pod pods pool_load release remove_pod renew spare status sweep undrain
}

impl Default for Scripts {
    fn default() -> Self {
        Self::edited(|_, code| code.to_owned())
    }
}
