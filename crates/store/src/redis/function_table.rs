// All Redis functions: file in lua/, access, priority under load shedding, and the operation name
// in metrics where it differs. Included by functions.rs and by the build script, which fails for a
// file without a row.
//
// Reads       registered as read-only
// Grows       refused by a full Redis
// AllowOom    runs in a full Redis: it ends, frees or bounds something, or keeps a call alive
functions! {
    adopt_calls         AllowOom   Essential
    adopt_pods          AllowOom   Essential
    allocate            Grows      Sheddable
    allocate_when_full  AllowOom   Sheddable   => "ask_again"
    apply_tiers         AllowOom   Essential
    attach              AllowOom   Essential
    audit_calls         AllowOom   Essential
    audit_dials         AllowOom   Essential
    audit_lines         AllowOom   Essential
    audit_pods          AllowOom   Essential
    audit_pool          AllowOom   Essential
    audit_reservations  AllowOom   Essential
    call                Reads      Sheddable
    calls               Reads      Sheddable
    capacity            Reads      Sheddable
    claim_pods          AllowOom   Essential
    confirm             AllowOom   Deferrable
    delete_merchant     AllowOom   Essential
    delete_prescale     AllowOom   Essential
    detach              AllowOom   Deferrable
    dial_demand         Reads      Sheddable
    dialed              AllowOom   Essential
    drain               AllowOom   Essential
    extend_pending      AllowOom   Essential   => "spare"
    failover            AllowOom   Essential
    give_back           AllowOom   Essential
    heartbeat           AllowOom   Essential
    migrate             AllowOom   Essential
    migrate_calls       AllowOom   Essential
    move_pod            AllowOom   Essential
    numbers             Reads      Sheddable
    observe_pod         AllowOom   Essential
    open_store          AllowOom   Essential   => "begin"
    outbound_status     Reads      Sheddable
    pod                 Reads      Sheddable
    pods                Reads      Essential
    pool_load           Reads      Sheddable
    prescale            Grows      Essential
    record_figures      Grows      Sheddable
    record_scaling      AllowOom   Essential
    release             AllowOom   Deferrable
    remove_pod          AllowOom   Essential
    renew               AllowOom   Essential
    report_waiting_dials Grows     Essential
    reservations        Reads      Sheddable
    reserve             Grows      Sheddable
    set_dial_limit      Grows      Essential
    set_merchant        Grows      Essential
    set_surplus         AllowOom   Essential
    status              Reads      Sheddable
    sweep               AllowOom   Essential
    undrain             AllowOom   Essential
    update_capacity     Grows      Essential
}
