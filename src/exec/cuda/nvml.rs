//! Clocks, temperature and power of a GPU, by NVML where it is there.
//!
//! Signatures and values are those of nvml.h. On an H100 and an H200 it has said clocks, temperature, power and that power held them down,
//! on the H200 energy and the power limit, too.

#![allow(unsafe_code)]

use super::libraries::{self, Wanted};
use libloading::{Library, Symbol};
use std::ffi::{CString, c_char, c_int, c_uint, c_void};

type Device = *mut c_void;

/// The state of a GPU at a moment: clocks in MHz, temperature in degrees Celsius, power in mW.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conditions {
    pub sm_mhz: u32,
    pub memory_mhz: u32,
    pub celsius: u32,
    pub milliwatts: u32,
    /// Why the clocks are not higher: bits of nvmlClocksEventReasons.
    pub reasons: u64,
}

/// The bits of nvmlClocksEventReasons that make a measurement doubtful.
const REASONS: [(u64, &str); 4] =
    [(0x4, "power cap"), (0x20, "thermal (software)"), (0x40, "thermal (hardware)"), (0x80, "power brake")];

impl std::fmt::Display for Conditions {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Conditions { sm_mhz, memory_mhz, celsius, milliwatts, reasons } = self;
        write!(f, "SM {sm_mhz} MHz, memory {memory_mhz} MHz, {celsius} C, {} W", milliwatts / 1000)?;
        REASONS.iter().filter(|(bit, _)| reasons & bit != 0).try_for_each(|(_, name)| write!(f, ", held by {name}"))
    }
}

/// The library, ready to be asked.
pub struct Nvml(Library);

impl Nvml {
    /// NVML of this machine; `None` where it is not here, or does not start.
    pub fn load() -> Option<Nvml> {
        libraries::find(Wanted::Nvml);
        // SAFETY: NVML's constructors have no conditions.
        let library = unsafe { Library::new("libnvidia-ml.so.1") }.ok()?;
        // SAFETY: the signature is that of nvml.h.
        let started = unsafe {
            let init: Symbol<unsafe extern "C" fn() -> c_int> = library.get(b"nvmlInit_v2\0").ok()?;
            init()
        };
        (started == 0).then_some(Nvml(library))
    }

    /// The GPU at a PCI bus address, `0000:17:00.0`.
    fn device(&self, bus: &str) -> Option<Device> {
        let bus = CString::new(bus).ok()?;
        let mut device: Device = std::ptr::null_mut();
        // SAFETY: the signature is that of nvml.h; what is written is written before the call returns.
        unsafe {
            let find: Symbol<unsafe extern "C" fn(*const c_char, *mut Device) -> c_int> =
                self.0.get(b"nvmlDeviceGetHandleByPciBusId_v2\0").ok()?;
            (find(bus.as_ptr(), &mut device) == 0).then_some(device)
        }
    }

    /// Joules that the GPU there has taken since its driver was loaded (nvmlDeviceGetTotalEnergyConsumption, in mJ).
    pub fn energy(&self, bus: &str) -> Option<f64> {
        let device = self.device(bus)?;
        let mut millijoules = 0u64;
        // SAFETY: the signature is that of nvml.h; what is written is written before the call returns.
        let status = unsafe {
            let ask: Symbol<unsafe extern "C" fn(Device, *mut u64) -> c_int> =
                self.0.get(b"nvmlDeviceGetTotalEnergyConsumption\0").ok()?;
            ask(device, &mut millijoules)
        };
        (status == 0).then_some(millijoules as f64 * 1e-3)
    }

    /// Watts that the GPU there may draw (nvmlDeviceGetEnforcedPowerLimit, in mW).
    pub fn power_limit(&self, bus: &str) -> Option<f64> {
        let device = self.device(bus)?;
        let mut milliwatts: c_uint = 0;
        // SAFETY: as above.
        let status = unsafe {
            let ask: Symbol<unsafe extern "C" fn(Device, *mut c_uint) -> c_int> =
                self.0.get(b"nvmlDeviceGetEnforcedPowerLimit\0").ok()?;
            ask(device, &mut milliwatts)
        };
        (status == 0).then_some(f64::from(milliwatts) * 1e-3)
    }

    /// The state of the GPU there; numbers that cannot be asked are 0.
    pub fn conditions(&self, bus: &str) -> Option<Conditions> {
        let device = self.device(bus)?;
        // SAFETY: signatures are those of nvml.h; everything written is written before a call returns.
        unsafe {
            let number = |name: &[u8], which: Option<c_uint>| -> u32 {
                let mut value: c_uint = 0;
                let status = match which {
                    Some(which) => self
                        .0
                        .get::<unsafe extern "C" fn(Device, c_uint, *mut c_uint) -> c_int>(name)
                        .map(|ask| ask(device, which, &mut value)),
                    None => self
                        .0
                        .get::<unsafe extern "C" fn(Device, *mut c_uint) -> c_int>(name)
                        .map(|ask| ask(device, &mut value)),
                };
                if status.is_ok_and(|status| status == 0) { value } else { 0 }
            };
            let mut reasons = 0u64;
            if let Ok(ask) = self
                .0
                .get::<unsafe extern "C" fn(Device, *mut u64) -> c_int>(b"nvmlDeviceGetCurrentClocksThrottleReasons\0")
                && ask(device, &mut reasons) != 0
            {
                reasons = 0;
            }
            let [sm, memory, by_chip] = [1, 2, 0];
            Some(Conditions {
                sm_mhz: number(b"nvmlDeviceGetClockInfo\0", Some(sm)),
                memory_mhz: number(b"nvmlDeviceGetClockInfo\0", Some(memory)),
                celsius: number(b"nvmlDeviceGetTemperature\0", Some(by_chip)),
                milliwatts: number(b"nvmlDeviceGetPowerUsage\0", None),
                reasons,
            })
        }
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: as above; started once, ended once.
        unsafe {
            if let Ok(end) = self.0.get::<unsafe extern "C" fn() -> c_int>(b"nvmlShutdown\0") {
                let _ = end();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_holds_clocks_down_is_named() {
        let at = |reasons| Conditions { sm_mhz: 1980, memory_mhz: 3201, celsius: 61, milliwatts: 698_500, reasons };
        assert_eq!(at(0).to_string(), "SM 1980 MHz, memory 3201 MHz, 61 C, 698 W");
        assert!(at(0x44).to_string().ends_with(", held by power cap, held by thermal (hardware)"));
    }

    #[test]
    fn where_there_is_none_nothing_is_asked() {
        if let Some(nvml) = Nvml::load() {
            assert_eq!(nvml.conditions("no bus"), None);
        }
    }
}
