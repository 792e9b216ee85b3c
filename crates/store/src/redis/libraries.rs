//! The function libraries in Redis. Routers of several versions may share a Redis, each with its
//! own library. A library of the previous version, which knows schema 1 only, is guarded: the guard
//! records each use of the store, and refuses the library's functions from schema 2 on.

use std::collections::HashMap;

use redis::{ErrorKind, FromRedisValue, RedisError, Value, cmd};

use super::{
    client::RedisClient,
    functions::{HASH_LENGTH, Library, NAME_PREFIX},
};

const GUARD: &str = include_str!("../../lua/migration/guard.lua");
/// Description of guarded functions in `FUNCTION LIST`, set by the guard.
const GUARDED: &str = "guarded";

/// Treatment of the libraries of the previous version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PreviousLibraries {
    /// A router of the previous version may be running.
    Guard,
    Delete,
}

/// The version that a library belongs to, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    /// `smart_router_<hash>`
    Previous,
    /// `smart_router_<schema>_<hash>`
    Schema,
    /// Another program's library with a similar name.
    Foreign,
}

impl Version {
    fn of(name: &str) -> Self {
        let is_hash = |text: &str| {
            text.len() == HASH_LENGTH && text.bytes().all(|byte| byte.is_ascii_hexdigit())
        };
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
        match name.strip_prefix(NAME_PREFIX) {
            Some(version) if is_hash(version) => Self::Previous,
            Some(version) => match version.split_once('_') {
                Some((schema, hash)) if is_number(schema) && is_hash(hash) => Self::Schema,
                _ => Self::Foreign,
            },
            None => Self::Foreign,
        }
    }
}

/// Inserts the guard into the code of a library of the previous version.
fn guarded(code: &str) -> Option<String> {
    let (header, body) = code.split_once('\n')?;
    let body = body.replace("redis.register_function(", "register_guarded(");
    Some(format!("{header}\n{GUARD}{body}"))
}

impl RedisClient {
    /// Deletes the libraries of other versions. A router that still runs one of them loads it
    /// again, which a full Redis refuses: loading this library again first checks that.
    pub(super) async fn tidy_libraries(
        &self,
        current: &Library,
        own: &[&str],
        previous: PreviousLibraries,
    ) -> Result<(), RedisError> {
        self.load_library(&current.code).await?;
        for (name, _) in self.libraries().await? {
            let is_deleted = match Version::of(&name) {
                Version::Schema => !own.contains(&name.as_str()),
                Version::Previous => previous == PreviousLibraries::Delete,
                Version::Foreign => false,
            };
            if is_deleted {
                self.command::<()>(cmd("FUNCTION").arg("DELETE").arg(name)).await?;
            }
        }
        if previous == PreviousLibraries::Guard {
            self.guard_libraries().await?;
        }
        Ok(())
    }

    /// Guards the libraries of the previous version. Returns the number of libraries without a
    /// guard: routers of the previous version have loaded them since the last call.
    pub(super) async fn guard_libraries(&self) -> Result<usize, RedisError> {
        let mut unguarded = 0;
        for (name, is_guarded) in self.libraries().await? {
            if is_guarded || Version::of(&name) != Version::Previous {
                continue;
            }
            unguarded += 1;
            // Another router may have deleted or guarded it meanwhile.
            let code = self.list_libraries(&name, &["WITHCODE"]).await?;
            let code = code.first().and_then(|library| text(library, "library_code"));
            if let Some(code) = code.filter(|code| !code.contains(GUARD)) {
                let code =
                    guarded(&code).ok_or((ErrorKind::Client, "a library without a header"))?;
                self.load_library(&code).await?;
            }
        }
        Ok(unguarded)
    }

    async fn load_library(&self, code: &str) -> Result<(), RedisError> {
        self.command(cmd("FUNCTION").arg("LOAD").arg("REPLACE").arg(code)).await
    }

    /// The libraries of all versions, and whether they are guarded.
    async fn libraries(&self) -> Result<Vec<(String, bool)>, RedisError> {
        let libraries = self.list_libraries(&format!("{NAME_PREFIX}*"), &[]).await?;
        let read = |library: HashMap<String, Value>| {
            let functions = library.get("functions").map(Vec::from_redis_value_ref);
            let functions: Vec<HashMap<String, Value>> =
                functions.and_then(Result::ok).unwrap_or_default();
            let is_guarded = |function: &HashMap<String, Value>| {
                text(function, "description").is_some_and(|text| text == GUARDED)
            };
            Some((text(&library, "library_name")?, functions.iter().any(is_guarded)))
        };
        Ok(libraries.into_iter().filter_map(read).collect())
    }

    async fn list_libraries(
        &self,
        name: &str,
        options: &[&str],
    ) -> Result<Vec<HashMap<String, Value>>, RedisError> {
        self.command(cmd("FUNCTION").arg("LIST").arg("LIBRARYNAME").arg(name).arg(options)).await
    }
}

fn text(fields: &HashMap<String, Value>, name: &str) -> Option<String> {
    String::from_redis_value_ref(fields.get(name)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redis::functions::Functions;

    #[test]
    fn libraries_are_recognised_by_their_names() {
        let functions = Functions::default();
        for (name, expected) in [
            (functions.schema_1.library.name.as_str(), Version::Schema),
            (&functions.schema_2.library.name, Version::Schema),
            ("smart_router_3_0123456789ab", Version::Schema),
            ("smart_router_0123456789ab", Version::Previous),
            ("smart_router_of_another_program", Version::Foreign),
            ("smart_router_0123456789abc", Version::Foreign),
            ("smart_router__0123456789ab", Version::Foreign),
            ("another_0123456789ab", Version::Foreign),
        ] {
            assert_eq!(Version::of(name), expected, "{name}");
        }
    }

    #[test]
    fn the_guard_follows_the_first_line_and_registers_all_functions() {
        let guarded = guarded("#!lua name=x\nredis.register_function({})\n").unwrap();
        assert!(guarded.starts_with("#!lua name=x\n--"), "{guarded}");
        assert!(guarded.ends_with("end\nregister_guarded({})\n"), "{guarded}");
    }
}
