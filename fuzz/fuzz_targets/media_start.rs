#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| smart_router_fuzz::media::start(data));
