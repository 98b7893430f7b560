//! The functions that a shared library exports, read from its ELF file.

use std::fs::File;

use anyhow::{Context, Result};
use object::{Object, ObjectSection, ObjectSymbol, ReadCache, SymbolKind};

/// Where in the file each exported function that `is_wanted` takes begins, in bytes; each place once, in order.
///
/// # Errors
/// The file cannot be read, or is no ELF file.
pub fn function_offsets(file: &File, is_wanted: impl Fn(&str) -> bool) -> Result<Vec<usize>> {
    // Of a library of many megabytes only what is asked for is read.
    let cache = ReadCache::new(file);
    let library = object::File::parse(&cache).context("its ELF headers make no sense")?;
    let functions = library.dynamic_symbols().filter(|symbol| symbol.kind() == SymbolKind::Text);
    let mut offsets = Vec::new();
    for function in functions.filter(|function| function.name().is_ok_and(&is_wanted)) {
        // Those of other libraries have no section.
        let Some(section) = function.section_index() else { continue };
        let section = library.section_by_index(section)?;
        let (begin, _) = section.file_range().context("a function has no place in the file")?;
        offsets.push((function.address() - section.address() + begin) as usize);
    }
    offsets.sort_unstable();
    offsets.dedup();
    Ok(offsets)
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
