"""Adjusts generated valid data to rules that a schema cannot express."""

import schemathesis


@schemathesis.hook
def before_call(context, case, kwargs):
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    query, body, path = case.query or {}, case.body, case.operation.path
    # Only the router issues valid cursors.
    query.pop("cursor", None)
    if path.endswith("/events") and "before" in query:
        # `before` and `after` exclude each other.
        query.pop("after", None)
    if path.endswith("/calls") and query.get("state") == "waiting":
        # Waiting calls have neither pool nor pod.
        query.pop("pool", None)
        query.pop("pod", None)
    if not isinstance(body, dict):
        return
    if path.endswith("/merchants/{id}") and body.get("fallback"):
        # Generated requests add and remove tiers; a merchant's pool does not depend on them.
        body["fallback"] = ["merchant:acme"]
    if body.get("parameters"):
        # Reserved names, control characters and the size of all are refused.
        body["parameters"] = {"language": "de"}
    if path.endswith("/prescale"):
        # Either a time in the future or a duration.
        body.pop("until", None)
        body["for"] = "1h"
    tiers = body.get("tiers", body) if path.endswith("/tiers") else {}
    for tier in tiers.values() if isinstance(tiers, dict) else ():
        # `min` may not be above `max`.
        if isinstance(tier, dict):
            tier.pop("max", None)
    if path.endswith(("/drain", "/reservations")) and body.get("wait"):
        # Generated waits of up to an hour are too long for a test.
        body["wait"] = "10ms"
