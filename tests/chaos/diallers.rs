//! Simulated diallers, and the cells in which they or their requests are lost.

use std::{sync::atomic::Ordering, thread, time::Duration};

use serde_json::{Value, json};

use super::{
    callers::{DEFAULT_WORKLOAD, Workload},
    cell::{Broken, Cell},
    cells::DEFAULT_CELL,
    deployment::{Deployment, ROUTERS},
    faults::{drop_replies, kill},
    http,
};
use testkit::{dice::Dice, proxy::KillPoint};

const NUMBER: &str = "+14155550100";

/// Reserves, dials and answers until the run ends. One dial in four is forgotten, as by a dialler
/// that was killed.
pub(crate) fn dial(deployment: &Deployment, mut dice: Dice) {
    let mut number = 0;
    while !deployment.is_finished.load(Ordering::Relaxed) {
        let body = json!({"merchant_id": "dialler", "number": NUMBER, "provider": "twilio",
            "count": 1 + dice.roll(3), "wait": "200ms"});
        let answer = post(deployment, &mut dice, "/api/v1/reservations", &body);
        let granted = answer.and_then(|it| it["reservations"].as_array().cloned());
        for granted in granted.unwrap_or_default() {
            number += 1;
            let id = granted["id"].as_str().unwrap_or_default();
            // Distinct from the calls of the callers, which the history check judges.
            let call = format!("dial-{:x}-{number}", dice.0 >> 40);
            end_dial(deployment, &mut dice, id, &call);
        }
        thread::sleep(Duration::from_millis(dice.roll(40) as u64));
    }
}

/// Ends a dial in one of the ways in which dials end.
fn end_dial(deployment: &Deployment, dice: &mut Dice, id: &str, call: &str) {
    let dialed = format!("/api/v1/reservations/{id}/dialed");
    match dice.roll(4) {
        0 => {}
        1 => {
            post(deployment, dice, &dialed, &json!({"call_sid": call}));
            let to = deployment.routers[dice.roll(ROUTERS)].address;
            let form = format!("CallSid={call}&CallStatus=no-answer");
            let (path, kind) = ("/api/v1/twilio/call-status", "application/x-www-form-urlencoded");
            // A lost callback leaves the reservation to its deadline.
            let _ = http::send(to, "POST", path, kind, form.as_bytes());
        }
        2 => {
            let to = deployment.routers[dice.roll(ROUTERS)].address;
            let path = format!("/api/v1/reservations/{id}");
            let _ = http::send(to, "DELETE", &path, "application/json", b"");
        }
        _ => {
            let body = json!({"call_sid": call, "reservation_id": id});
            post(deployment, dice, "/api/v1/allocate", &body);
            thread::sleep(Duration::from_millis(5 + dice.roll(60) as u64));
            for _ in 0..5 {
                let body = json!({"call_sid": call});
                if post(deployment, dice, "/api/v1/release", &body).is_some() {
                    break;
                }
            }
        }
    }
}

/// The JSON of a successful response.
fn post(deployment: &Deployment, dice: &mut Dice, path: &str, body: &Value) -> Option<Value> {
    let to = deployment.routers[dice.roll(ROUTERS)].address;
    let response = http::post(to, path, body).ok()?;
    serde_json::from_str(&response.body).ok().filter(|_| response.status == 200)
}

const DIALS: Workload = Workload { diallers: 5, clients: 3, ..DEFAULT_WORKLOAD };
/// A call whose response was lost ends with its lease, a reservation with its lifetime.
const SETTINGS: &[(&str, &str)] = &[("LEASE_TTL", "3s"), ("RESERVATION_TTL", "2s")];
const RECOVERY_TIME: Duration = Duration::from_secs(8);

pub(crate) static CELLS: [Cell; 3] = [
    Cell {
        name: "dialler-killed",
        description: "diallers are killed between the reservation and the dial",
        settings: SETTINGS,
        workload: DIALS,
        recovery_time: RECOVERY_TIME,
        fault: |context| context.pause(1_500, 2_000),
        broken: Broken::Edit(&[(
            "      outbound.end_reservation(facts, 'expired')\n",
            "      run('ZREM', K.reservations, id)\n",
        )]),
        broken_description: "an expired reservation keeps its slot and its line",
        ..DEFAULT_CELL
    },
    Cell {
        name: "kill-after-grant",
        description: "kill -9 of a router between the grant of a reservation and its response",
        settings: SETTINGS,
        workload: Workload { clients: 1, retries: 0, ..DIALS },
        recovery_time: RECOVERY_TIME,
        fault: |context| kill(context, KillPoint::AfterReply),
        broken: Broken::Edit(&[("  run_index('ZADD', K.reservations, unpack(deadlines))\n", "")]),
        broken_description: "a reservation without a deadline",
        ..DEFAULT_CELL
    },
    Cell {
        name: "grant-reply-lost",
        description: "Redis grants reservations, and the replies are lost",
        settings: SETTINGS,
        workload: DIALS,
        recovery_time: RECOVERY_TIME,
        fault: drop_replies,
        broken: Broken::Edit(&[(
            "      outbound.end_reservation(facts, 'expired')\n",
            "      if facts.call ~= '' then outbound.end_reservation(facts, 'expired') \
             else run('ZREM', K.reservations, id) end\n",
        )]),
        broken_description: "a grant that its dialler does not know of keeps its slot",
        ..DEFAULT_CELL
    },
];
