use std::process::ExitCode;

fn main() -> ExitCode {
    foretrain::cli::main()
}
