//! Where NVIDIA's libraries are, when the dynamic linker does not know: in the toolkit's folder, in Python's wheels, in the
//! folder of a container's driver. What is loaded here by its path is found by its name afterwards, whoever asks for it.

#![allow(unsafe_code)]

use libloading::Library;
use std::path::{Path, PathBuf};

/// A library by the beginning of its file's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    Driver,
    Nvml,
    Nvrtc,
    CublasLt,
    Cudnn,
    Nccl,
}

impl Wanted {
    /// The names that are looked for, the newest first.
    fn names(self) -> &'static [&'static str] {
        match self {
            Wanted::Driver => &["libcuda.so.1"],
            Wanted::Nvml => &["libnvidia-ml.so.1"],
            Wanted::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12"],
            Wanted::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12"],
            Wanted::Cudnn => &["libcudnn.so.9"],
            Wanted::Nccl => &["libnccl.so.2"],
        }
    }

    /// Whether it comes with the driver, and not with the toolkit.
    fn of_driver(self) -> bool {
        matches!(self, Wanted::Driver | Wanted::Nvml)
    }
}

/// Loads a library from where it is installed, unless the linker finds it by its name. Whoever wants it asks for it by
/// name after that, and says so if it is nowhere.
pub fn find(wanted: Wanted) {
    // SAFETY: constructors of these libraries have no conditions.
    let load = |name: &Path| unsafe { Library::new(name) }.ok();
    if wanted == Wanted::Cudnn
        && let Some(newer) = newer_cudnn(&variable, &of_driver())
        && let Some(found) = load(&newer)
    {
        return std::mem::forget(found);
    }
    // What is found stays for as long as the program runs: to load and unload it with every question takes longer than to
    // ask.
    if let Some(found) = wanted.names().iter().find_map(|name| load(Path::new(name))) {
        return std::mem::forget(found);
    }
    let folders = if wanted.of_driver() { of_driver() } else { of_toolkit(&variable) };
    for name in wanted.names() {
        for folder in folders.iter().filter(|folder| folder.join(name).exists()) {
            // NVRTC looks up its builtins by name.
            if wanted == Wanted::Nvrtc {
                starting(folder, "libnvrtc-builtins.so").iter().filter_map(|f| load(f)).for_each(std::mem::forget);
            }
            if let Some(found) = load(&folder.join(name)) {
                return std::mem::forget(found);
            }
        }
    }
}

/// The cuDNN of a Python's wheels where that is newer than the system's: it is what PyTorch trains with there, and the
/// kernels of attention have become faster with most versions. `None` where somebody has said which by
/// `LD_LIBRARY_PATH`, or where the linker finds one of a version that its file does not tell.
fn newer_cudnn(get: &dyn Fn(&str) -> Option<PathBuf>, system: &[PathBuf]) -> Option<PathBuf> {
    let name = Wanted::Cudnn.names()[0];
    let own = get("LD_LIBRARY_PATH");
    if own.is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(name).exists())) {
        return None;
    }
    let system = system.iter().map(|folder| folder.join(name)).find(|file| file.exists())?;
    let wheels = of_toolkit(get).into_iter().map(|folder| folder.join(name)).filter(|file| file.exists());
    let newest = wheels.filter_map(|file| Some((version(&file)?, file))).max()?;
    (newest.0 > version(&system)?).then_some(newest.1)
}

/// The version of a library: from the name of the file that links lead to, as `libcudnn.so.9.14.0`, or from what a wheel
/// has beside its packages, as `nvidia_cudnn_cu13-9.19.0.56.dist-info`.
fn version(file: &Path) -> Option<Vec<u32>> {
    let numbers = |text: &str| text.split('.').map(|part| part.parse().ok()).collect::<Option<Vec<u32>>>();
    let real = file.canonicalize().ok()?;
    let of_name = real.file_name()?.to_str()?.split_once(".so.").and_then(|(_, after)| numbers(after));
    if let Some(version) = of_name.filter(|version| version.len() > 1) {
        return Some(version);
    }
    // lib, cudnn, nvidia, site-packages
    let packages = real.ancestors().nth(4)?;
    let folder = starting(packages, "nvidia_cudnn").pop()?;
    let (_, after) = folder.file_name()?.to_str()?.strip_suffix(".dist-info")?.split_once('-')?;
    numbers(after)
}

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Files or folders of a folder whose names start so, in order.
fn starting(folder: &Path, with: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut all: Vec<PathBuf> = entries
        .map(|e| e.path())
        .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(with)))
        .collect();
    all.sort();
    all
}

/// Folders where containers and distributions put the driver's libraries.
fn of_driver() -> Vec<PathBuf> {
    let known = [
        "/usr/local/nvidia/lib64",
        "/usr/local/nvidia/lib",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib/wsl/lib",
        "/run/opengl-driver/lib",
    ];
    known.map(PathBuf::from).into()
}

/// Folders of the toolkit's libraries: beside the program, in toolkits, in the wheels of every Python that is on the
/// PATH.
fn of_toolkit(get: &dyn Fn(&str) -> Option<PathBuf>) -> Vec<PathBuf> {
    let program = std::env::current_exe().ok().and_then(|p| p.parent().map(Path::to_path_buf));
    let mut all: Vec<PathBuf> = program.into_iter().collect();
    let on_path = |name: &str| -> Vec<PathBuf> {
        let folders = get("PATH").map(|path| std::env::split_paths(&path).collect::<Vec<_>>()).unwrap_or_default();
        folders.into_iter().filter(|folder| folder.join(name).exists()).collect()
    };
    // A program's folder is bin/; a link to it may lead to where the rest is.
    let prefixes = |name: &str| -> Vec<PathBuf> {
        let up = |file: PathBuf| Some(file.parent()?.parent()?.to_path_buf());
        let of = |folder: PathBuf| {
            let file = folder.join(name);
            [up(file.clone()), file.canonicalize().ok().and_then(up)]
        };
        on_path(name).into_iter().flat_map(of).flatten().collect()
    };
    let mut toolkits: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(get).collect();
    toolkits.extend(prefixes("nvcc"));
    toolkits.push("/usr/local/cuda".into());
    toolkits.extend(starting(Path::new("/usr/local"), "cuda-").into_iter().rev());
    toolkits.push("/opt/cuda".into());
    for toolkit in toolkits {
        all.extend(["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"].map(|lib| toolkit.join(lib)));
    }
    let mut pythons: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(get).collect();
    pythons.extend(["python3", "python"].into_iter().flat_map(prefixes));
    pythons.extend(get("HOME").map(|home| home.join(".local")));
    pythons.extend(["/usr/local", "/usr"].map(PathBuf::from));
    for python in pythons {
        all.push(python.join("lib"));
        for version in starting(&python.join("lib"), "python3") {
            for packages in ["site-packages", "dist-packages"] {
                let wheels = starting(&version.join(packages).join("nvidia"), "");
                all.extend(wheels.into_iter().map(|wheel| wheel.join("lib")));
            }
        }
    }
    let mut seen = vec![];
    all.retain(|folder| {
        folder.is_dir() && !seen.contains(folder) && {
            seen.push(folder.clone());
            true
        }
    });
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newer_cudnn_is_taken_where_versions_are_known() {
        let dir = tempfile::tempdir().unwrap();
        let packages = dir.path().join("venv/lib/python3.12/site-packages");
        let wheel = packages.join("nvidia/cudnn/lib/libcudnn.so.9");
        let system = dir.path().join("libcudnn.so.9.14.0");
        for file in [
            &wheel,
            &system,
            &packages.join("nvidia_cudnn_cu13-9.19.0.56.dist-info/METADATA"),
            &dir.path().join("venv/bin/python3"),
        ] {
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, "").unwrap();
        }
        let link = dir.path().join("libcudnn.so.9");
        std::os::unix::fs::symlink(&system, &link).unwrap();
        assert_eq!(version(&link), Some(vec![9, 14, 0]));
        assert_eq!(version(&wheel), Some(vec![9, 19, 0, 56]));
        assert!(version(&wheel) > version(&link));
        let unknown = dir.path().join("lib/libcudnn.so.9");
        std::fs::create_dir(dir.path().join("lib")).unwrap();
        std::fs::write(&unknown, "").unwrap();
        assert_eq!(version(&unknown), None);
        let newer = |said: Option<&Path>, system: &Path| {
            let get = |name: &str| match name {
                "PATH" => Some(dir.path().join("venv/bin")),
                "LD_LIBRARY_PATH" => said.map(Path::to_path_buf),
                _ => None,
            };
            newer_cudnn(&get, &[system.into()])
        };
        assert_eq!(newer(None, dir.path()), Some(wheel.clone()));
        assert_eq!(newer(Some(dir.path()), dir.path()), None, "somebody has said which");
        assert_eq!(newer(None, unknown.parent().unwrap()), None, "nobody knows which is newer");
        std::fs::rename(&system, dir.path().join("libcudnn.so.9.21.0")).unwrap();
        std::fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink(dir.path().join("libcudnn.so.9.21.0"), &link).unwrap();
        assert_eq!(newer(None, dir.path()), None, "the system's is newer");
    }

    #[test]
    fn wheels_and_toolkits_are_found_from_what_is_on_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let make = |path: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "").unwrap();
        };
        make("venv/bin/python3");
        make("venv/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13");
        make("venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2");
        make("toolkit/bin/nvcc");
        make("toolkit/lib64/libcublasLt.so.13");
        let get = |name: &str| match name {
            "PATH" => Some(
                std::env::join_paths([dir.path().join("venv/bin"), dir.path().join("toolkit/bin")]).unwrap().into(),
            ),
            _ => None,
        };
        let found = of_toolkit(&get);
        for wanted in [
            "toolkit/lib64",
            "venv/lib/python3.12/site-packages/nvidia/cu13/lib",
            "venv/lib/python3.12/site-packages/nvidia/nccl/lib",
        ] {
            assert!(found.contains(&dir.path().join(wanted)), "{wanted} is not among {found:?}");
        }
    }
}
