//! The Lua library: one function per operation, concatenated at build time. It has one form per
//! schema of the layout, which differ in the names of two fields of the call record. The name of a
//! library contains its schema and the hash of its text, so that routers of several versions can
//! share a Redis.

use std::sync::Arc;

use super::concurrency_limit::Priority;

/// The schema of the layout that this version migrates to.
pub(super) const SCHEMA: u64 = 2;
/// The schema of the previous version.
pub(super) const PREVIOUS_SCHEMA: u64 = 1;

/// Prefix of the names of all libraries and functions.
pub(super) const NAME_PREFIX: &str = "smart_router_";
/// Length of the hash in the name of a library.
pub(super) const HASH_LENGTH: usize = 12;
/// Default length of the event log.
const EVENT_LIMIT: usize = 20_000;

/// A function of the library.
pub struct Function {
    /// Operation name in metrics and traces.
    pub name: &'static str,
    /// Name in Redis.
    pub function: String,
    pub(super) library: Arc<Library>,
    pub(crate) access: Access,
    pub(crate) priority: Priority,
}

/// Access of a function to the data; the build script translates it to the flags of Redis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Reads,
    Grows,
    AllowOom,
}

impl Function {
    /// Whether the function is read-only.
    pub(crate) fn is_reading(&self) -> bool {
        self.access == Access::Reads
    }
}

/// A library in the form that `FUNCTION LOAD` accepts.
pub struct Library {
    pub name: String,
    pub code: String,
}

impl Library {
    /// Completes the text of the library for a schema.
    fn new(schema: u64, event_limit: usize, text: &str) -> Self {
        let [own, other] = match schema {
            PREVIOUS_SCHEMA => [["attempt", "attempts"], ["request_ids", "pod_attempt"]],
            _ => [["request_ids", "pod_attempt"], ["attempt", "attempts"]],
        };
        let code = format!(
            "local SCHEMA = '{schema}'\n\
             local REQUEST_IDS, POD_ATTEMPT = '{}', '{}'\n\
             local OTHER_REQUEST_IDS, OTHER_POD_ATTEMPT = '{}', '{}'\n\
             local EVENT_LIMIT = '{event_limit}'\n{text}",
            own[0], own[1], other[0], other[1]
        );
        let hash = redis::Script::new(&code).get_hash()[..HASH_LENGTH].to_owned();
        let version = format!("{schema}_{hash}");
        let name = format!("{NAME_PREFIX}{version}");
        let code = format!("#!lua name={name}\nlocal VERSION = '{version}'\n{code}");
        Self { name, code }
    }
}

/// The functions for both schemas.
pub struct Functions {
    pub schema_1: FunctionSet,
    pub schema_2: FunctionSet,
}

impl Functions {
    /// Functions whose event log has about `limit` events; 0 disables it.
    pub fn with_event_limit(limit: usize) -> Self {
        Self::new(limit, str::to_owned)
    }

    /// Functions with an edited text: tests break them on purpose.
    pub fn edited(edit: impl Fn(&str) -> String) -> Self {
        Self::new(EVENT_LIMIT, edit)
    }

    fn new(event_limit: usize, edit: impl Fn(&str) -> String) -> Self {
        let text = edit(include_str!(concat!(env!("OUT_DIR"), "/library.lua")));
        let set = |schema| FunctionSet::new(Library::new(schema, event_limit, &text));
        Self { schema_1: set(PREVIOUS_SCHEMA), schema_2: set(SCHEMA) }
    }

    /// The functions for a schema.
    pub(super) fn of(&self, schema: u64) -> &FunctionSet {
        if schema == PREVIOUS_SCHEMA { &self.schema_1 } else { &self.schema_2 }
    }
}

impl Default for Functions {
    fn default() -> Self {
        Self::with_event_limit(EVENT_LIMIT)
    }
}

macro_rules! functions {
    ($($name:ident $access:ident $priority:ident $(=> $operation:literal)?)*) => {
        /// The functions for one schema.
        pub struct FunctionSet {
            pub library: Arc<Library>,
            $(pub $name: Function,)*
        }

        impl FunctionSet {
            fn new(library: Library) -> Self {
                let library = Arc::new(library);
                let version = library.name.strip_prefix(NAME_PREFIX).unwrap_or_default();
                Self {
                    $($name: Function {
                        name: [$($operation,)? stringify!($name)][0],
                        function: format!("{NAME_PREFIX}{}_{version}", stringify!($name)),
                        library: library.clone(),
                        access: Access::$access,
                        priority: Priority::$priority,
                    },)*
                    library: library.clone(),
                }
            }

            pub fn all(&self) -> impl Iterator<Item = &Function> {
                [$(&self.$name,)*].into_iter()
            }
        }
    };
}

include!("function_table.rs");
