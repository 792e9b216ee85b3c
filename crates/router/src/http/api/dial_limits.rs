//! `/numbers` and `/accounts`: lines of numbers, and calls per second of provider accounts.

use axum::{Json, extract::State, http::StatusCode, response::Response};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::{PartialSchema, ToSchema};

use crate::http::{
    ApiError, RequestLog, Shared,
    middleware::{auth::Caller, body::JsonBody},
    openapi::{Endpoint, Group, schemas},
    reply::PathName,
};
use fleet::{
    AccountStatus, NumberStatus,
    names::{AccountName, InvalidName, PhoneNumber},
    rules::{MAX_CPS, MAX_LINES},
};
use telephony::Provider;

#[derive(Deserialize, ToSchema)]
#[schema(as = NumberLimit)]
pub(crate) struct NumberBody {
    #[schema(schema_with = schemas::max_lines, required)]
    max_lines: Option<Value>,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = AccountLimit)]
pub(crate) struct AccountBody {
    #[schema(schema_with = schemas::max_cps, required)]
    max_cps: Option<Value>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = Number)]
pub(crate) struct NumberJson {
    #[schema(value_type = schemas::PhoneNumber)]
    number: PhoneNumber,
    max_lines: u32,
    /// Lines in use by calls and reservations.
    lines: usize,
}

#[derive(Serialize, ToSchema)]
#[schema(as = Account)]
pub(crate) struct AccountJson {
    #[schema(value_type = schemas::AccountName)]
    account: AccountName,
    max_cps: u32,
    /// Time of the last reservation in unix seconds.
    #[schema(required)]
    last_dial_at: Option<f64>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Numbers {
    numbers: Vec<NumberJson>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Accounts {
    accounts: Vec<AccountJson>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct LimitChanged {
    success: bool,
}

/// A number in the path, in any form that providers use.
pub(crate) struct NumberInPath(PhoneNumber);

impl TryFrom<String> for NumberInPath {
    type Error = InvalidName;

    fn try_from(text: String) -> Result<Self, InvalidName> {
        PhoneNumber::parse(&text).map(Self)
    }
}

/// An account in the path, of a known provider.
pub(crate) struct AccountInPath(AccountName);

impl TryFrom<String> for AccountInPath {
    type Error = InvalidName;

    fn try_from(text: String) -> Result<Self, InvalidName> {
        text.split(':').next().unwrap_or_default().parse::<Provider>()?;
        text.parse().map(Self)
    }
}

fn number_json(status: NumberStatus) -> NumberJson {
    let NumberStatus { number, max_lines, lines } = status;
    NumberJson { number, max_lines, lines }
}

fn account_json(status: AccountStatus) -> AccountJson {
    let AccountStatus { account, max_cps, last_dial } = status;
    let last_dial_at = (last_dial > 0).then_some(last_dial as f64 / 1_000.0);
    AccountJson { account, max_cps, last_dial_at }
}

fn number_example() -> NumberJson {
    let number = "+14155550100".parse().expect("a number");
    NumberJson { number, max_lines: 20, lines: 3 }
}

fn account_example() -> AccountJson {
    let account = "twilio".parse().expect("an account");
    AccountJson { account, max_cps: 1, last_dial_at: Some(1_763_280_000.0) }
}

pub(crate) fn numbers_endpoint() -> Endpoint {
    Endpoint::new(Group::Settings, "List numbers with a limit of lines")
        .responds(Numbers { numbers: vec![number_example()] })
        .uses_store()
}

pub(crate) fn accounts_endpoint() -> Endpoint {
    Endpoint::new(Group::Settings, "List provider accounts with a rate limit")
        .responds(Accounts { accounts: vec![account_example()] })
        .uses_store()
}

fn number_endpoint(summary: &str) -> Endpoint {
    Endpoint::new(Group::Settings, summary)
        .path_param("number", schemas::PhoneNumber::schema(), "+14155550100")
        .error(400, "The number is invalid.")
        .uses_store()
}

fn account_endpoint(summary: &str) -> Endpoint {
    Endpoint::new(Group::Settings, summary)
        .path_param("account", schemas::AccountName::schema(), "twilio")
        .error(400, "The account is invalid.")
        .uses_store()
}

fn or_not_found(endpoint: Endpoint, what: &str) -> Endpoint {
    endpoint.error_with(
        404,
        "There is no such limit.",
        json!({"error": format!("{what} not found")}),
    )
}

pub(crate) fn get_number_endpoint() -> Endpoint {
    or_not_found(number_endpoint("Get the lines of a number"), "number").responds(number_example())
}

pub(crate) fn put_number_endpoint() -> Endpoint {
    number_endpoint("Limit the lines of a number")
        .description(
            "Calls to and from the number use a line until they are over, dials from their \
             reservation. Only dials are refused.",
        )
        .json_body::<NumberBody>(json!({"max_lines": 20}))
        .responds(LimitChanged { success: true })
}

pub(crate) fn delete_number_endpoint() -> Endpoint {
    or_not_found(number_endpoint("Delete the limit of a number's lines"), "number")
        .responds(LimitChanged { success: true })
}

pub(crate) fn get_account_endpoint() -> Endpoint {
    or_not_found(account_endpoint("Get the rate limit of an account"), "account")
        .responds(account_example())
}

pub(crate) fn put_account_endpoint() -> Endpoint {
    account_endpoint("Limit the calls per second of a provider account")
        .description(
            "The account is a provider (`twilio`) or one of its accounts (`twilio:AC1`). \
             Reservations are evenly spaced: no second has more than `max_cps`.",
        )
        .json_body::<AccountBody>(json!({"max_cps": 1}))
        .responds(LimitChanged { success: true })
}

pub(crate) fn delete_account_endpoint() -> Endpoint {
    or_not_found(account_endpoint("Delete the rate limit of an account"), "account")
        .responds(LimitChanged { success: true })
}

fn read_limit(field: &str, value: Option<&Value>, max: u32) -> Result<u32, ApiError> {
    let value = value.unwrap_or(&Value::Null);
    // Accepts 2.0: JSON does not separate integers from floats.
    let whole = value.as_f64().filter(|number| number.fract() == 0.0);
    let limit = whole.filter(|number| (0.0..=f64::from(max)).contains(number));
    limit.map(|limit| limit as u32).ok_or_else(|| ApiError {
        details: Some(json!({"field": field})),
        ..ApiError::bad_request(format!("{field} {value}: expected a whole number from 0 to {max}"))
    })
}

fn not_found(what: &str) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, format!("{what} not found"))
}

fn changed(outcome: &'static str) -> Response {
    let log = RequestLog { outcome, ..RequestLog::default() };
    log.attach(Json(LimitChanged { success: true }))
}

pub(crate) async fn numbers(State(context): Shared) -> Result<Json<Numbers>, ApiError> {
    let numbers = context.store.numbers().await?;
    Ok(Json(Numbers { numbers: numbers.into_iter().map(number_json).collect() }))
}

pub(crate) async fn get_number(
    State(context): Shared,
    PathName(NumberInPath(number)): PathName<NumberInPath>,
) -> Result<Json<NumberJson>, ApiError> {
    let found = context.store.number(&number).await?;
    found.map(|found| Json(number_json(found))).ok_or_else(|| not_found("number"))
}

pub(crate) async fn put_number(
    State(context): Shared,
    PathName(NumberInPath(number)): PathName<NumberInPath>,
    caller: Caller,
    JsonBody(body): JsonBody<NumberBody>,
) -> Result<Response, ApiError> {
    let max_lines = read_limit("max_lines", body.max_lines.as_ref(), MAX_LINES)?;
    context.store.set_number(&number, Some(max_lines), &caller.to_string()).await?;
    Ok(changed("number_set"))
}

pub(crate) async fn delete_number(
    State(context): Shared,
    PathName(NumberInPath(number)): PathName<NumberInPath>,
    caller: Caller,
) -> Result<Response, ApiError> {
    match context.store.set_number(&number, None, &caller.to_string()).await? {
        true => Ok(changed("number_deleted")),
        false => Err(not_found("number")),
    }
}

pub(crate) async fn accounts(State(context): Shared) -> Result<Json<Accounts>, ApiError> {
    let accounts = context.store.outbound().await?.accounts;
    Ok(Json(Accounts { accounts: accounts.into_iter().map(account_json).collect() }))
}

pub(crate) async fn get_account(
    State(context): Shared,
    PathName(AccountInPath(account)): PathName<AccountInPath>,
) -> Result<Json<AccountJson>, ApiError> {
    let accounts = context.store.outbound().await?.accounts;
    let found = accounts.into_iter().find(|it| it.account == account);
    found.map(|found| Json(account_json(found))).ok_or_else(|| not_found("account"))
}

pub(crate) async fn put_account(
    State(context): Shared,
    PathName(AccountInPath(account)): PathName<AccountInPath>,
    caller: Caller,
    JsonBody(body): JsonBody<AccountBody>,
) -> Result<Response, ApiError> {
    let max_cps = read_limit("max_cps", body.max_cps.as_ref(), MAX_CPS)?;
    context.store.set_account(&account, Some(max_cps), &caller.to_string()).await?;
    Ok(changed("account_set"))
}

pub(crate) async fn delete_account(
    State(context): Shared,
    PathName(AccountInPath(account)): PathName<AccountInPath>,
    caller: Caller,
) -> Result<Response, ApiError> {
    match context.store.set_account(&account, None, &caller.to_string()).await? {
        true => Ok(changed("account_deleted")),
        false => Err(not_found("account")),
    }
}
