use std::process::ExitCode;

fn main() -> ExitCode {
    smart_router::cli::main()
}
