//! Studies that keep their rows in a folder.

use clap::Args;

#[derive(Args)]
pub struct Title {
    /// Title of the picture
    #[arg(long = "title", value_name = "TEXT")]
    pub text: Option<String>,
}

#[derive(Args)]
pub struct Fresh {
    /// Forget the rows that the folder has
    #[arg(long = "fresh")]
    pub asked: bool,
}
