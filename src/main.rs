use std::process::ExitCode;

/// Rows of a sweep take and give back buffers of some hundred kilobytes all the time. The C library's allocator returns
/// each to the system at once, and to get it back page by page took several times as long as the row.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    foretrain::cli::main()
}
