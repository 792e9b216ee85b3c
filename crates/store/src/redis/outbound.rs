//! Reservations, lines of numbers and rates of accounts: the arguments of their Redis functions, and
//! the replies.

use std::collections::BTreeMap;

use super::{
    Redis, keys,
    operations::unexpected,
    reply::{millis, parse},
};
use crate::{Outbound, OutboundStore, Reply, StoreError};
use fleet::{
    AccountStatus, DialDemand, DialRefused, HeldDials, Millis, NumberStatus, OutboundStatus,
    Reservation, ReservationNotFound, ReservationPage, ReservationQuery, ReservationStatus,
    ReservationUse, Reserve, Reserved, WaitingDials,
    merchant::Malformed,
    names::{AccountName, CallSid, MerchantId, PhoneNumber, Pool, ReservationId},
    outbound::{AnswerRate, DialSums},
};

/// Reservations that one step examines, and steps per page of the API.
const ROWS_PER_STEP: &str = "100";
const MAX_STEPS: usize = 20;

impl OutboundStore for Redis {
    fn reserve<'a>(&'a self, request: &'a Reserve) -> Reply<'a, Reserved> {
        Box::pin(async move {
            let number = request.number.as_ref().map_or("", |number| number.as_str());
            let [ttl, target] = [request.ttl, request.miss_target.into()].map(|it| it.to_string());
            let accounts: Vec<&str> = request.accounts.iter().map(AccountName::as_str).collect();
            let accounts = accounts.join(" ");
            let mut args = vec![request.merchant.as_str(), number, &ttl, &target, &accounts];
            args.extend(request.ids.iter().map(ReservationId::as_str));
            let mut reply = self.run(&self.functions().reserve, &args).await?;
            let (until, limit, retry_after) =
                (reply.number()?, reply.parse_some()?, reply.number()?);
            let malformed = Some(reply.text()?).filter(|text| !text.is_empty());
            Ok(Reserved {
                granted: reply.names()?,
                until,
                limit,
                retry_after,
                malformed_merchant: malformed.map(Malformed::new),
            })
        })
    }

    fn dialed<'a>(
        &'a self,
        id: &'a ReservationId,
        call: &'a CallSid,
        ttl: Millis,
    ) -> Reply<'a, Result<Millis, DialRefused>> {
        Box::pin(async move {
            let args = [id.as_str(), call.as_str(), &ttl.to_string()];
            let mut reply = self.run(&self.functions().dialed, &args).await?;
            match reply.word.as_str() {
                "dialed" => Ok(Ok(reply.number()?)),
                "not_found" => Ok(Err(ReservationNotFound.into())),
                "other_reservation" => {
                    Ok(Err(DialRefused::OtherReservation(parse(&reply.text()?)?)))
                }
                "in_progress" => Ok(Err(DialRefused::CallInProgress)),
                _ => Err(unexpected(&reply)),
            }
        })
    }

    fn give_back<'a>(
        &'a self,
        id: &'a ReservationId,
    ) -> Reply<'a, Result<(), ReservationNotFound>> {
        Box::pin(async move {
            let reply = self.run(&self.functions().give_back, &[id.as_str()]).await?;
            match reply.word.as_str() {
                "given_back" => Ok(Ok(())),
                "not_found" => Ok(Err(ReservationNotFound)),
                _ => Err(unexpected(&reply)),
            }
        })
    }

    fn reservation<'a>(&'a self, id: &'a ReservationId) -> Reply<'a, Option<ReservationStatus>> {
        Box::pin(async move {
            let key = format!("{}{id}", self.key(keys::RESERVATION));
            let text = self.query_unless_wrong_type(redis::cmd("GET").arg(&key)).await?;
            let text: Option<String> = text.flatten();
            let Some(found) = text.and_then(|text| reservation(id.as_str(), &text)) else {
                return Ok(None);
            };
            // The record outlives its deadline until the sweep.
            let (seconds, micros): (u64, u64) = self.query(&redis::cmd("TIME")).await?;
            Ok(Some(found).filter(|it| it.facts.until > seconds * 1_000 + micros / 1_000))
        })
    }

    fn reservations<'a>(&'a self, query: &'a ReservationQuery) -> Reply<'a, ReservationPage> {
        Box::pin(self.list_reservations(query))
    }

    fn answer_probability<'a>(&'a self, merchant: &'a MerchantId) -> Reply<'a, u64> {
        Box::pin(async move {
            let key = format!("{}{merchant}", self.key(keys::ANSWER_RATE));
            let text = self.query_unless_wrong_type(redis::cmd("GET").arg(&key)).await?;
            let text: String = text.flatten().unwrap_or_default();
            let known = text.split_once(' ').and_then(|(dials, answers)| {
                Some(AnswerRate { dials: dials.parse().ok()?, answers: answers.parse().ok()? })
            });
            Ok(known.unwrap_or_default().probability())
        })
    }

    fn outbound(&self) -> Reply<'_, Outbound> {
        Box::pin(async move {
            let mut reply = self.run(&self.functions().outbound_status, &[]).await?;
            let reservations = reply.number()? as usize;
            let (dials, accounts) = (reply.texts()?, reply.texts()?);
            // Skip invalid names, which only a manual edit can have written.
            let pools = dials.chunks_exact(2);
            let mut pools: Vec<(Pool, HeldDials)> = pools.filter_map(pool_dials).collect();
            pools.sort_by(|a, b| a.0.cmp(&b.0));
            let accounts = accounts.chunks_exact(3).filter_map(account_status);
            let mut accounts: Vec<AccountStatus> = accounts.collect();
            accounts.sort_by(|a, b| a.account.cmp(&b.account));
            let status = OutboundStatus { reservations, pools };
            Ok(Outbound { status, accounts })
        })
    }

    fn numbers(&self) -> Reply<'_, Vec<NumberStatus>> {
        Box::pin(async move {
            // In small steps, because a step blocks Redis. A scan may return a number twice.
            let (mut numbers, mut cursor) = (BTreeMap::new(), "0".to_owned());
            loop {
                let args = [cursor.as_str(), ROWS_PER_STEP];
                let mut reply = self.run(&self.functions().numbers, &args).await?;
                cursor = reply.text()?;
                let found = reply.texts()?;
                let found = found.chunks_exact(3).filter_map(number_status);
                numbers.extend(found.map(|found| (found.number.clone(), found)));
                if cursor == "0" {
                    return Ok(numbers.into_values().collect());
                }
            }
        })
    }

    fn number<'a>(&'a self, number: &'a PhoneNumber) -> Reply<'a, Option<NumberStatus>> {
        Box::pin(async move {
            let key = self.key(keys::NUMBERS);
            let limit = redis::cmd("HGET").arg(&key).arg(number.as_str()).to_owned();
            let limit: Option<String> = self.query_unless_wrong_type(&limit).await?.flatten();
            let Some(limit) = limit else { return Ok(None) };
            let lines = format!("{}{number}", self.key(keys::LINES));
            let lines = self.query_unless_wrong_type(redis::cmd("SCARD").arg(&lines)).await?;
            let max_lines = limit_of(&limit);
            Ok(Some(NumberStatus { number: number.clone(), max_lines, lines: lines.unwrap_or(0) }))
        })
    }

    fn report_waiting_dials<'a>(
        &'a self,
        router: &'a str,
        waiting: &'a [WaitingDials],
    ) -> Reply<'a, ()> {
        Box::pin(async move {
            let counts: Vec<String> = waiting.iter().map(|it| it.dials.to_string()).collect();
            let mut args = vec![router];
            for (WaitingDials { merchant, number, .. }, dials) in waiting.iter().zip(&counts) {
                let number = number.as_ref().map_or("-", |number| number.as_str());
                args.extend([merchant.as_str(), number, dials]);
            }
            self.run(&self.functions().report_waiting_dials, &args).await.map(drop)
        })
    }

    fn dial_demand(&self) -> Reply<'_, BTreeMap<Pool, DialDemand>> {
        Box::pin(async move {
            let mut reply = self.run(&self.functions().dial_demand, &[]).await?;
            let (waiting, dials) = (reply.texts()?, reply.texts()?);
            let mut demand: BTreeMap<Pool, DialDemand> = BTreeMap::new();
            // Skip invalid names, which only a manual edit can have written.
            for (pool, dials) in dials.chunks_exact(2).filter_map(pool_dials) {
                demand.entry(pool).or_default().held = dials.held;
            }
            for row in waiting.chunks_exact(3) {
                let Ok(pool) = row[0].parse() else { continue };
                let known = demand.entry(pool).or_default();
                (known.waiting, known.probability) = (parse(&row[1])?, parse(&row[2])?);
            }
            Ok(demand)
        })
    }

    fn set_number<'a>(
        &'a self,
        number: &'a PhoneNumber,
        max_lines: Option<u32>,
        by: &'a str,
    ) -> Reply<'a, bool> {
        Box::pin(self.set_dial_limit("number", number.as_str(), max_lines, by))
    }

    fn set_account<'a>(
        &'a self,
        account: &'a AccountName,
        max_cps: Option<u32>,
        by: &'a str,
    ) -> Reply<'a, bool> {
        Box::pin(self.set_dial_limit("account", account.as_str(), max_cps, by))
    }
}

impl Redis {
    async fn set_dial_limit(
        &self,
        kind: &str,
        name: &str,
        limit: Option<u32>,
        by: &str,
    ) -> Result<bool, StoreError> {
        let limit = limit.map(|limit| limit.to_string()).unwrap_or_default();
        let args = [kind, name, &limit, by];
        let mut reply = self.run(&self.functions().set_dial_limit, &args).await?;
        reply.flag()
    }

    /// One page of reservations. As with calls, a page may be short although more pages follow.
    async fn list_reservations(
        &self,
        query: &ReservationQuery,
    ) -> Result<ReservationPage, StoreError> {
        let mut page = ReservationPage { reservations: Vec::new(), next: query.after.clone() };
        for _ in 0..MAX_STEPS {
            let (until, id) = match &page.next {
                Some((until, id)) => (until.to_string(), id.to_string()),
                None => (String::new(), String::new()),
            };
            let args = [until.as_str(), &id, ROWS_PER_STEP];
            let mut reply = self.run(&self.functions().reservations, &args).await?;
            let rows = reply.texts()?;
            let found = rows.chunks_exact(2).filter_map(|row| reservation(&row[0], &row[1]));
            let is_match = |it: &ReservationStatus| {
                query.merchant.as_ref().is_none_or(|merchant| *merchant == it.facts.merchant)
            };
            page.reservations.extend(found.filter(is_match));
            let (until, id) = (reply.text()?, reply.text()?);
            if page.reservations.len() > query.limit {
                page.reservations.truncate(query.limit);
                let last = page.reservations.last();
                page.next = last.map(|last| (last.facts.until, last.id.clone()));
                return Ok(page);
            }
            page.next = if id.is_empty() { None } else { Some((millis(&until)?, parse(&id)?)) };
            if page.next.is_none() || page.reservations.len() == query.limit {
                break;
            }
        }
        Ok(page)
    }
}

/// Parses the record of a reservation; `None` for a malformed one.
fn reservation(id: &str, text: &str) -> Option<ReservationStatus> {
    let words: Vec<&str> = text.split(' ').collect();
    let [until, at, probability, pool, merchant, number, account, call] = words[..] else {
        return None;
    };
    fn given<T: std::str::FromStr>(word: &str) -> Option<T> {
        word.parse().ok().filter(|_| word != "-")
    }
    let facts = Reservation {
        merchant: merchant.parse().ok()?,
        pool: pool.parse().ok()?,
        number: given(number),
        account: given(account),
        probability: probability.parse().ok()?,
        at: at.parse().ok()?,
        until: until.parse().ok()?,
        call: given(call),
    };
    Some(ReservationStatus { id: id.parse().ok()?, facts })
}

fn pool_dials(row: &[String]) -> Option<(Pool, HeldDials)> {
    let numbers: Vec<u64> = row[1].split(' ').filter_map(|word| word.parse().ok()).collect();
    let [held, dials, probability, variance] = numbers[..] else { return None };
    Some((
        row[0].parse().ok()?,
        HeldDials { sums: DialSums { dials, probability, variance }, held },
    ))
}

/// A limit as the functions read it: a malformed one allows no dial.
fn limit_of(text: &str) -> u32 {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if is_number { text.parse().unwrap_or(u32::MAX) } else { 0 }
}

fn number_status(row: &[String]) -> Option<NumberStatus> {
    let (number, max_lines) = (row[0].parse().ok()?, limit_of(&row[1]));
    Some(NumberStatus { number, max_lines, lines: row[2].parse().ok()? })
}

fn account_status(row: &[String]) -> Option<AccountStatus> {
    let (account, max_cps) = (row[0].parse().ok()?, limit_of(&row[1]));
    Some(AccountStatus { account, max_cps, last_dial: row[2].parse().unwrap_or(0) })
}

/// Parses the effect of a reservation on an allocation; empty if the request named none.
pub(super) fn reservation_use(text: &str) -> Result<Option<ReservationUse>, StoreError> {
    Ok(match text.split_once(' ') {
        Some(("used", merchant)) => Some(ReservationUse::Used { merchant: parse(merchant)? }),
        Some(("repeated", merchant)) => {
            Some(ReservationUse::Repeated { merchant: parse(merchant)? })
        }
        None if text == "unknown" => Some(ReservationUse::Unknown),
        None if text == "other_merchant" => Some(ReservationUse::OtherMerchant),
        None if text.is_empty() => None,
        _ => return Err(StoreError::Failed(format!("unexpected effect of a reservation: {text}"))),
    })
}
