//! Baselines for the router's benchmarks on the same HTTP stack: the documented procedure with
//! many Redis commands, and a minimal handler with one script per operation.

use std::{collections::HashMap, net::SocketAddr, sync::Arc};

use axum::{
    Json, Router,
    extract::{Path, State},
    http::StatusCode,
    routing::{get, post},
};
use redis::{Cmd, FromRedisValue, aio::MultiplexedConnection, cmd};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    net::TcpSocket,
    sync::{Mutex, Semaphore},
};

enum RedisConnection {
    /// Ten connections, one command in flight on each.
    Pool { free: Mutex<Vec<MultiplexedConnection>>, permits: Semaphore },
    /// One multiplexed connection.
    Shared(MultiplexedConnection),
}

impl RedisConnection {
    async fn run<T: FromRedisValue>(&self, command: &Cmd) -> T {
        match self {
            Self::Shared(connection) => command.query_async(&mut connection.clone()).await.unwrap(),
            Self::Pool { free, permits } => {
                let _permit = permits.acquire().await.unwrap();
                let mut connection = free.lock().await.pop().expect("as many as permits");
                let answer = command.query_async(&mut connection).await.unwrap();
                free.lock().await.push(connection);
                answer
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BaselineKind {
    /// Many commands over a pool of ten connections.
    Pool,
    /// Many commands over one multiplexed connection.
    Mux,
    /// One script per operation.
    Bare,
}

impl std::str::FromStr for BaselineKind {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "pool" => Ok(Self::Pool),
            "mux" => Ok(Self::Mux),
            "bare" => Ok(Self::Bare),
            _ => Err(()),
        }
    }
}

struct Tier {
    name: String,
    /// Maximum number of calls per pod of a shared tier.
    cap: Option<u32>,
}

struct Server {
    connection: RedisConnection,
    is_bare: bool,
    chain: Vec<Tier>,
    hashes: HashMap<&'static str, String>,
}

const LOCK: &str = r"
local existing = redis.call('HGETALL', KEYS[1])
if #existing > 0 then return existing end
redis.call('HSET', KEYS[1], '_lock', '1')
redis.call('EXPIRE', KEYS[1], 30)
return {}";

const TAKE_SHARED: &str = r"
local pods = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
for i = 1, #pods, 2 do
  if tonumber(pods[i + 1]) >= tonumber(ARGV[1]) then return nil end
  if redis.call('EXISTS', 'voice:pod:draining:' .. pods[i]) == 0 then
    redis.call('ZINCRBY', KEYS[1], 1, pods[i])
    return pods[i]
  end
end
return nil";

const GIVE_SHARED: &str = r"
local score = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not score then return -1 end
if tonumber(score) > 0 then return tonumber(redis.call('ZINCRBY', KEYS[1], -1, ARGV[1])) end
return 0";

/// Looks up the call, pops a pod, checks draining, and writes the call record with its TTL, the
/// pod's fields, the lease and the two call indexes.
const BARE_ALLOCATE: &str = r"
local key = 'voice:call:' .. ARGV[1]
local pod = redis.call('HGET', key, 'pod_name')
if pod then return pod end
pod = redis.call('SPOP', 'voice:pool:gold:available')
if not pod then return nil end
if redis.call('EXISTS', 'voice:pod:draining:' .. pod) == 1 then return nil end
local deadline = tonumber(ARGV[2]) + 900000
redis.call('HSET', key, 'pod_name', pod, 'source_pool', 'pool:gold', 'merchant_id', '', 'allocated_at', ARGV[2])
redis.call('EXPIRE', key, 3600)
redis.call('HSET', 'voice:pod:' .. pod, 'status', 'allocated', 'allocated_call_sid', ARGV[1], 'allocated_at', ARGV[2], 'source_pool', 'pool:gold')
redis.call('SET', 'voice:lease:' .. pod, ARGV[1], 'EX', 900)
redis.call('ZADD', 'voice:calls', deadline, ARGV[1])
redis.call('ZADD', 'voice:pod:calls:' .. pod, deadline, ARGV[1])
return pod";

const BARE_RELEASE: &str = r"
local key = 'voice:call:' .. ARGV[1]
local pod = redis.call('HGET', key, 'pod_name')
if not pod then return nil end
redis.call('ZREM', 'voice:calls', ARGV[1])
redis.call('ZREM', 'voice:pod:calls:' .. pod, ARGV[1])
redis.call('DEL', 'voice:lease:' .. pod)
redis.call('HSET', 'voice:pod:' .. pod, 'status', 'available', 'allocated_call_sid', '', 'allocated_at', '')
redis.call('DEL', key)
if redis.call('EXISTS', 'voice:pod:draining:' .. pod) == 0 then redis.call('SADD', 'voice:pool:gold:available', pod) end
return pod";

#[derive(Deserialize)]
struct Body {
    call_sid: String,
    merchant_id: Option<String>,
}

type Shared = State<Arc<Server>>;
type Answer = Result<Json<Value>, StatusCode>;

/// Serves until the process ends. `chain` is `gold` or `gold basic:200`.
pub async fn serve(kind: BaselineKind, address: SocketAddr, redis_url: &str, chain: &str) {
    let client = redis::Client::open(redis_url).unwrap();
    let mut connections = Vec::new();
    for _ in 0..if kind == BaselineKind::Pool { 10 } else { 1 } {
        connections.push(client.get_multiplexed_async_connection().await.unwrap());
    }
    let mut hashes = HashMap::new();
    for script in [LOCK, TAKE_SHARED, GIVE_SHARED, BARE_ALLOCATE, BARE_RELEASE] {
        let load = cmd("SCRIPT").arg("LOAD").arg(script).to_owned();
        hashes.insert(script, load.query_async(&mut connections[0]).await.unwrap());
    }
    let connection = match kind {
        BaselineKind::Pool => {
            RedisConnection::Pool { free: Mutex::new(connections), permits: Semaphore::new(10) }
        }
        BaselineKind::Mux | BaselineKind::Bare => RedisConnection::Shared(connections.remove(0)),
    };
    let tier = |text: &str| match text.split_once(':') {
        Some((name, cap)) => Tier { name: name.into(), cap: cap.parse().ok() },
        None => Tier { name: text.into(), cap: None },
    };
    let chain = chain.split_whitespace().map(tier).collect();
    let server =
        Arc::new(Server { connection, is_bare: kind == BaselineKind::Bare, chain, hashes });
    let routes = Router::new()
        .route("/api/v1/allocate", post(allocate))
        .route("/api/v1/release", post(release))
        .route("/api/v1/tiers", get(tiers))
        .route("/api/v1/pod/{name}", get(pod))
        .with_state(server);
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(address).unwrap();
    axum::serve(socket.listen(4096).unwrap(), routes).await.unwrap();
}

fn now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.unwrap().as_millis() as u64
}

impl Server {
    fn script(&self, code: &'static str) -> Cmd {
        let mut command = cmd("EVALSHA");
        command.arg(&self.hashes[code]);
        command
    }

    /// Walks the chain as documented. Returns the pod and its pool.
    async fn take(&self) -> Option<(String, String)> {
        for Tier { name, cap } in &self.chain {
            let key = format!("voice:pool:{name}:available");
            let pod: Option<String> = match cap {
                Some(cap) => {
                    self.connection.run(self.script(TAKE_SHARED).arg(1).arg(&key).arg(cap)).await
                }
                None => {
                    let pod: Option<String> = self.connection.run(cmd("SPOP").arg(&key)).await;
                    if let Some(pod) = &pod {
                        let draining = format!("voice:pod:draining:{pod}");
                        let _: bool = self.connection.run(cmd("EXISTS").arg(draining)).await;
                    }
                    pod
                }
            };
            if let Some(pod) = pod {
                return Some((pod, format!("pool:{name}")));
            }
        }
        None
    }
}

fn given(pod: &str, pool: &str) -> Json<Value> {
    let url = format!(
        "wss://agents.example.com/ws/pod/{pod}/agent/voice/breeze-buddy/twilio/callback/order-confirmation/v2"
    );
    Json(
        json!({"success": true, "pod_name": pod, "ws_url": url, "source_pool": pool, "was_existing": false}),
    )
}

async fn allocate(State(server): Shared, Json(body): Json<Body>) -> Answer {
    let (connection, call) = (&server.connection, &body.call_sid);
    if server.is_bare {
        let script = server.script(BARE_ALLOCATE).arg(0).arg(call).arg(now()).to_owned();
        let pod: Option<String> = connection.run(&script).await;
        return pod.map(|pod| given(&pod, "pool:gold")).ok_or(StatusCode::SERVICE_UNAVAILABLE);
    }
    let key = format!("voice:call:{call}");
    let found: HashMap<String, String> = connection.run(server.script(LOCK).arg(1).arg(&key)).await;
    if let (Some(pod), Some(pool)) = (found.get("pod_name"), found.get("source_pool")) {
        return Ok(given(pod, pool));
    }
    if let Some(id) = &body.merchant_id {
        let _: Option<String> =
            connection.run(cmd("HGET").arg("voice:merchant:config").arg(id)).await;
    }
    let (pod, pool) = server.take().await.ok_or(StatusCode::SERVICE_UNAVAILABLE)?;
    let at = now() / 1_000;
    let merchant = body.merchant_id.as_deref().unwrap_or_default();
    let fields = [("pod_name", pod.as_str()), ("source_pool", &pool), ("merchant_id", merchant)];
    let () = connection.run(cmd("HSET").arg(&key).arg(&fields).arg("allocated_at").arg(at)).await;
    let () = connection.run(cmd("HDEL").arg(&key).arg("_lock")).await;
    let () = connection.run(cmd("EXPIRE").arg(&key).arg(3600)).await;
    let fields = [("status", "allocated"), ("allocated_call_sid", call), ("source_pool", &pool)];
    let pod_key = format!("voice:pod:{pod}");
    let () =
        connection.run(cmd("HSET").arg(pod_key).arg(&fields).arg("allocated_at").arg(at)).await;
    let lease = format!("voice:lease:{pod}");
    let () = connection.run(cmd("SET").arg(lease).arg(call).arg("EX").arg(900)).await;
    Ok(given(&pod, &pool))
}

async fn release(State(server): Shared, Json(body): Json<Body>) -> Answer {
    let (connection, call) = (&server.connection, &body.call_sid);
    if server.is_bare {
        let script = server.script(BARE_RELEASE).arg(0).arg(call).to_owned();
        let pod: Option<String> = connection.run(&script).await;
        return pod.map(|pod| freed(&pod, "pool:gold")).ok_or(StatusCode::NOT_FOUND);
    }
    let key = format!("voice:call:{call}");
    let found: HashMap<String, String> = connection.run(cmd("HGETALL").arg(&key)).await;
    let (Some(pod), Some(pool)) = (found.get("pod_name"), found.get("source_pool")) else {
        return Err(StatusCode::NOT_FOUND);
    };
    let draining = format!("voice:pod:draining:{pod}");
    let _: bool = connection.run(cmd("EXISTS").arg(&draining)).await;
    let tier = pool.trim_start_matches("pool:");
    let available = format!("voice:pool:{tier}:available");
    let is_shared = server.chain.iter().any(|other| other.name == tier && other.cap.is_some());
    let left: i64 = if is_shared {
        connection.run(server.script(GIVE_SHARED).arg(1).arg(&available).arg(pod)).await
    } else {
        let _: bool = connection.run(cmd("EXISTS").arg(&draining)).await;
        let () = connection.run(cmd("SADD").arg(&available).arg(pod)).await;
        0
    };
    if left <= 0 {
        let () = connection.run(cmd("DEL").arg(format!("voice:lease:{pod}"))).await;
    }
    let fields = [("status", "available"), ("allocated_call_sid", ""), ("allocated_at", "")];
    let pod_key = format!("voice:pod:{pod}");
    let at = now() / 1_000;
    let () = connection.run(cmd("HSET").arg(pod_key).arg(&fields).arg("released_at").arg(at)).await;
    let () = connection.run(cmd("DEL").arg(&key)).await;
    Ok(freed(pod, pool))
}

fn freed(pod: &str, pool: &str) -> Json<Value> {
    Json(json!({"success": true, "pod_name": pod, "released_to_pool": pool, "was_draining": false}))
}

/// Tiers, for the load generator's check of pod capacities.
async fn tiers(State(server): Shared) -> Json<Value> {
    let tier = |tier: &Tier| {
        let described = match tier.cap {
            Some(cap) => json!({"type": "shared", "target": 1, "max_concurrent": cap}),
            None => json!({"target": 1}),
        };
        (tier.name.clone(), described)
    };
    let tiers: serde_json::Map<String, Value> = server.chain.iter().map(tier).collect();
    Json(json!({"tiers": tiers}))
}

async fn pod(State(server): Shared, Path(name): Path<String>) -> Json<Value> {
    for tier in server.chain.iter().filter(|tier| tier.cap.is_some()) {
        let key = format!("voice:pool:{}:available", tier.name);
        let score: Option<f64> = server.connection.run(cmd("ZSCORE").arg(key).arg(&name)).await;
        if score.is_some() {
            return Json(json!({"tier": tier.name}));
        }
    }
    Json(json!({"tier": server.chain.first().map(|tier| tier.name.clone())}))
}
