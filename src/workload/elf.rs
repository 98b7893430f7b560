//! The functions that a shared library exports, read from its ELF file.

use std::fs::File;
use std::io::{self, Error, ErrorKind};
use std::os::unix::fs::FileExt;

/// Sizes of a section header and a symbol of a 64-bit file, in bytes.
const SECTION_BYTES: usize = 64;
const SYMBOL_BYTES: usize = 24;
/// `SHT_DYNSYM`.
const DYNAMIC_SYMBOLS: u32 = 11;
/// `STT_FUNC`.
const FUNCTION: u8 = 2;
/// More than any library has: a file that says more is no library.
const MOST_BYTES: u64 = 256 << 20;

#[derive(Clone, Copy)]
struct Section {
    kind: u32,
    address: u64,
    offset: u64,
    size: u64,
    link: u32,
}

/// Where in the file each exported function that `is_wanted` takes begins, in bytes; each place once, in order.
///
/// # Errors
/// The file cannot be read, or is no 64-bit ELF file of this machine's byte order.
pub fn function_offsets(file: &File, is_wanted: impl Fn(&str) -> bool) -> io::Result<Vec<usize>> {
    let header = read(file, 0, 64)?;
    // Class 2 is 64 bits.
    if header.get(..5) != Some(b"\x7fELF\x02") {
        return Err(Error::new(ErrorKind::InvalidData, "it is no 64-bit ELF file"));
    }
    let (at, count) = (u64_at(&header, 0x28)?, u16_at(&header, 0x3c)?);
    let table = read(file, at, u64::from(count) * SECTION_BYTES as u64)?;
    let sections: Vec<Section> = table.chunks_exact(SECTION_BYTES).map(section).collect::<io::Result<_>>()?;

    let mut offsets = Vec::new();
    for symbols in sections.iter().filter(|section| section.kind == DYNAMIC_SYMBOLS) {
        let Some(names) = sections.get(symbols.link as usize) else { continue };
        let names = read(file, names.offset, names.size)?;
        for symbol in read(file, symbols.offset, symbols.size)?.chunks_exact(SYMBOL_BYTES) {
            // Undefined symbols are in section 0, which has no address, and special ones in none that exists.
            let home = match u16_at(symbol, 6)? {
                0 => None,
                index => sections.get(usize::from(index)),
            };
            let (Some(home), FUNCTION) = (home, symbol[4] & 0xf) else { continue };
            let name = names.get(u32_at(symbol, 0)? as usize..).and_then(|rest| rest.split(|&byte| byte == 0).next());
            if name.and_then(|name| std::str::from_utf8(name).ok()).is_some_and(&is_wanted) {
                let offset = u64_at(symbol, 8)?.wrapping_sub(home.address).wrapping_add(home.offset);
                offsets.push(offset as usize);
            }
        }
    }
    offsets.sort_unstable();
    offsets.dedup();
    Ok(offsets)
}

fn section(header: &[u8]) -> io::Result<Section> {
    Ok(Section {
        kind: u32_at(header, 4)?,
        address: u64_at(header, 0x10)?,
        offset: u64_at(header, 0x18)?,
        size: u64_at(header, 0x20)?,
        link: u32_at(header, 0x28)?,
    })
}

fn read(file: &File, offset: u64, size: u64) -> io::Result<Vec<u8>> {
    if size > MOST_BYTES {
        return Err(broken());
    }
    let mut bytes = vec![0; size as usize];
    file.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}

fn broken() -> Error {
    Error::new(ErrorKind::InvalidData, "its ELF headers make no sense")
}

fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> io::Result<[u8; N]> {
    bytes.get(at..at + N).and_then(|part| part.try_into().ok()).ok_or_else(broken)
}

fn u16_at(bytes: &[u8], at: usize) -> io::Result<u16> {
    bytes_at(bytes, at).map(u16::from_ne_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> io::Result<u32> {
    bytes_at(bytes, at).map(u32::from_ne_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> io::Result<u64> {
    bytes_at(bytes, at).map(u64::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;
    use crate::workload::maps::parse_maps;

    /// The C library's file, and where in it `name` is, as the dynamic linker found it.
    fn in_libc(name: &CStr) -> (String, usize) {
        let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) } as u64;
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let code = parse_maps(&maps).find(|mapping| (mapping.start..mapping.end).contains(&address)).unwrap();
        (code.path, (address - code.start + code.offset) as usize)
    }

    #[test]
    fn a_function_is_where_the_dynamic_linker_found_it_and_others_are_left_out() {
        let (path, raise) = in_libc(c"raise");
        let (_, pause) = in_libc(c"pause");
        let libc = File::open(path).unwrap();
        let mut both = [raise, pause];
        both.sort_unstable();
        assert_eq!(function_offsets(&libc, |name| name == "pause" || name == "raise").unwrap(), both);
        assert!(function_offsets(&libc, |_| false).unwrap().is_empty());
    }

    #[test]
    fn a_file_that_is_no_library_is_an_error() {
        assert!(function_offsets(&File::open("/proc/self/cmdline").unwrap(), |_| true).is_err());
    }
}
