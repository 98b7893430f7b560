//! What a process has mapped: the lines of `/proc/PID/maps`.

/// One mapping of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// First address after it.
    pub end: u64,
    /// Where in the file it starts, in bytes.
    pub offset: u64,
    /// Whether it may be executed.
    pub is_executable: bool,
    /// Device and inode, which tell the file whatever its name.
    pub file: FileId,
    /// The path by which it was mapped, as the process sees it.
    pub path: String,
}

/// A file, whatever its names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileId {
    /// Device, as `/proc/PID/maps` writes it.
    pub device: String,
    /// Inode number.
    pub inode: u64,
}

/// The mappings of files in the text of `/proc/PID/maps`. Memory without a file is left out.
pub fn parse_maps(text: &str) -> impl Iterator<Item = Mapping> {
    text.lines().filter_map(parse_line)
}

fn parse_line(line: &str) -> Option<Mapping> {
    // Splitting by single spaces keeps those of the path.
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    let is_executable = fields.next()?.contains('x');
    let offset = u64::from_str_radix(fields.next()?, 16).ok()?;
    let file = FileId { device: fields.next()?.to_string(), inode: fields.next()?.parse().ok()? };
    let path = fields.next()?.trim_start();
    let path = path.strip_suffix(" (deleted)").unwrap_or(path).to_string();
    (file.inode != 0).then_some(Mapping { start, end, offset, is_executable, file, path })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_told_from_other_memory_and_paths_may_hold_spaces() {
        let text = "\
7f0000000000-7f0000001000 r--p 00000000 fe:01 42 /usr/lib/libcuda.so.1
7f0000001000-7f0000003000 r-xp 00001000 fe:01 42                         /opt/a b/libcuda.so.550.1 (deleted)
7f0000004000-7f0000005000 rw-p 00000000 00:00 0 
7ffc00000000-7ffc00001000 r-xp 00000000 00:00 0                          [vdso]
";
        let maps: Vec<Mapping> = parse_maps(text).collect();
        assert_eq!(maps.len(), 2);
        assert!(!maps[0].is_executable);
        let code = Mapping {
            start: 0x7f00_0000_1000,
            end: 0x7f00_0000_3000,
            offset: 0x1000,
            is_executable: true,
            file: FileId { device: "fe:01".into(), inode: 42 },
            path: "/opt/a b/libcuda.so.550.1".into(),
        };
        assert_eq!(maps[1], code);
    }
}
