//! The Lua library: one function per operation, joined at build time. Redis keeps it
//! under a name that tells its text from any other, so that routers of several
//! versions can share a Redis.

use super::concurrency_limit::Priority;

/// A function of the library.
pub struct Script {
    /// The operation, as metrics call it.
    pub name: &'static str,
    /// What Redis calls it.
    pub function: String,
    pub(crate) access: Access,
    pub(crate) priority: Priority,
}

/// What a function may do; the build script registers it with the flags of Redis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Reads,
    Grows,
    AllowOom,
}

impl Script {
    /// Whether it only reads.
    pub(crate) fn is_reading(&self) -> bool {
        self.access == Access::Reads
    }
}

/// The library as Redis takes it.
#[derive(Clone)]
pub struct Library {
    pub name: String,
    pub code: String,
}

/// What the names of all our libraries begin with.
pub(super) const LIBRARIES: &str = "smart_router_";
/// How many events are kept where nobody says.
pub(super) const EVENTS: usize = 20_000;
/// How many digits of its hash tell a library from others.
pub(super) const VERSION: usize = 12;

macro_rules! functions {
    ($($name:ident $access:ident $priority:ident)*) => {
        /// All scripts of the store.
        pub struct Scripts {
            pub library: Library,
            $(pub $name: Script,)*
        }

        impl Scripts {
            /// Scripts that keep the last `events` events, about; none for 0.
            pub fn keeping(events: usize) -> Self {
                Self::built(events, str::to_owned)
            }

            /// The scripts after `edit` has been at the library's text: tests break
            /// them on purpose.
            pub fn edited(edit: impl Fn(&str) -> String) -> Self {
                Self::built(EVENTS, edit)
            }

            fn built(events: usize, edit: impl Fn(&str) -> String) -> Self {
                let code = edit(include_str!(concat!(env!("OUT_DIR"), "/library.lua")));
                let code = format!("local KEPT = '{events}'\n{code}");
                let hash = redis::Script::new(&code).get_hash().to_owned();
                let version = &hash[..VERSION];
                let name = format!("{LIBRARIES}{version}");
                let code = format!("#!lua name={name}\nlocal VERSION = '{version}'\n{code}");
                Self {
                    library: Library { name, code },
                    $($name: Script {
                        name: stringify!($name),
                        function: format!("{LIBRARIES}{}_{version}", stringify!($name)),
                        access: Access::$access,
                        priority: Priority::$priority,
                    },)*
                }
            }

            pub fn all(&self) -> impl Iterator<Item = &Script> {
                [$(&self.$name,)*].into_iter()
            }
        }
    };
}

include!("function_table.rs");

impl Default for Scripts {
    fn default() -> Self {
        Self::keeping(EVENTS)
    }
}
