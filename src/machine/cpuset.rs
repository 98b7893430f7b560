//! A set of CPU (or node) numbers, and the two ways in which the kernel writes one.

use std::fmt;

use anyhow::{Context, Result, bail};
use serde::{Serialize, Serializer};

/// Numbers above this are taken for nonsense: they would make a typing error allocate gigabytes.
const MAX_NUMBER: u32 = 1 << 20;

/// A set of CPU numbers as the kernel counts them. Serialises as an ascending array of numbers.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct CpuSet {
    // No trailing zero words, so that equal sets compare equal.
    words: Vec<u64>,
}

impl CpuSet {
    /// The empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads the kernel's list format, for example `0-3,8` (`local_cpulist`, `online`). Blank is empty.
    ///
    /// # Errors
    /// Anything that is not a list of numbers and ascending ranges.
    pub fn from_list(text: &str) -> Result<Self> {
        let mut set = Self::new();
        for part in text.trim().split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| -> Result<u32> {
                let number = text.trim().parse().with_context(|| format!("`{part}` in the CPU list `{text}`"))?;
                if number > MAX_NUMBER {
                    bail!("{number} is no CPU number");
                }
                Ok(number)
            };
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                bail!("the range `{part}` runs backwards");
            }
            set.extend(first..=last);
        }
        Ok(set)
    }

    /// Reads the kernel's mask format, for example `000000ff,ffff0000` (`local_cpus`, `cpumap`): 32-bit words,
    /// most significant first.
    ///
    /// # Errors
    /// Anything that is not hexadecimal words separated by commas.
    pub fn from_mask(text: &str) -> Result<Self> {
        let mut set = Self::new();
        for (position, word) in text.trim().rsplit(',').enumerate() {
            let word = word.trim();
            if word.is_empty() {
                continue;
            }
            let bits = u32::from_str_radix(word.trim_start_matches("0x"), 16)
                .with_context(|| format!("`{word}` in the CPU mask `{}`", text.trim()))?;
            set.extend((0..32).filter(|bit| bits >> bit & 1 == 1).map(|bit| position as u32 * 32 + bit));
        }
        Ok(set)
    }

    /// Reads 64-bit words, least significant first, as NVML writes its affinities.
    pub fn from_words(words: impl IntoIterator<Item = u64>) -> Self {
        let mut set = Self { words: words.into_iter().collect() };
        set.trim();
        set
    }

    /// Adds one number.
    pub fn insert(&mut self, number: u32) {
        let word = number as usize / 64;
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (number % 64);
    }

    /// Whether `number` is in the set.
    pub fn contains(&self, number: u32) -> bool {
        self.words.get(number as usize / 64).is_some_and(|word| word >> (number % 64) & 1 == 1)
    }

    /// Whether nothing is in the set.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// How many numbers are in the set.
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The numbers, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.words.iter().enumerate().flat_map(|(index, word)| {
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| index as u32 * 64 + bit)
        })
    }

    /// What is in both sets.
    pub fn intersection(&self, other: &Self) -> Self {
        Self::from_words(self.words.iter().zip(&other.words).map(|(a, b)| a & b))
    }

    /// What is in either set.
    pub fn union(&self, other: &Self) -> Self {
        self.iter().chain(other.iter()).collect()
    }

    /// What is in this set and not in the other.
    pub fn difference(&self, other: &Self) -> Self {
        self.iter().filter(|number| !other.contains(*number)).collect()
    }

    /// Whether all of this set is in the other.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.iter().all(|number| other.contains(number))
    }

    fn trim(&mut self) {
        while self.words.last() == Some(&0) {
            self.words.pop();
        }
    }
}

impl Extend<u32> for CpuSet {
    fn extend<T: IntoIterator<Item = u32>>(&mut self, numbers: T) {
        numbers.into_iter().for_each(|number| self.insert(number));
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<T: IntoIterator<Item = u32>>(numbers: T) -> Self {
        let mut set = Self::new();
        set.extend(numbers);
        set
    }
}

/// The kernel's list format.
impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut numbers = self.iter().peekable();
        let mut separator = "";
        while let Some(first) = numbers.next() {
            let mut last = first;
            while numbers.peek() == Some(&(last + 1)) {
                last += 1;
                numbers.next();
            }
            match last - first {
                0 => write!(f, "{separator}{first}")?,
                _ => write!(f, "{separator}{first}-{last}")?,
            }
            separator = ",";
        }
        Ok(())
    }
}

impl fmt::Debug for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuSet({self})")
    }
}

impl Serialize for CpuSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_masks_of_the_same_cpus_are_equal() {
        let list = CpuSet::from_list("0-3,8,64-65\n").unwrap();
        assert_eq!(list, CpuSet::from_mask("00000003,00000000,0000010f\n").unwrap());
        assert_eq!(list, CpuSet::from_words([0x10f, 3, 0]));
        assert_eq!(list.len(), 7);
        assert_eq!(list.to_string(), "0-3,8,64-65");
    }

    #[test]
    fn blank_is_empty_and_not_cpu_0() {
        for set in [CpuSet::from_list("\n").unwrap(), CpuSet::from_mask("0000,00000000").unwrap()] {
            assert!(set.is_empty());
            assert!(!set.contains(0));
            assert_eq!(set.to_string(), "");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["x", "3-1", "0-4294967295", "-1"] {
            assert!(CpuSet::from_list(text).is_err(), "{text}");
        }
        assert!(CpuSet::from_mask("fffffffff").is_err());
    }

    #[test]
    fn set_arithmetic_leaves_no_empty_words_behind() {
        let low = CpuSet::from_list("0-3").unwrap();
        let both = CpuSet::from_list("0-3,100").unwrap();
        assert_eq!(both.intersection(&low), low);
        assert_eq!(both.difference(&CpuSet::from_list("100").unwrap()), low);
        assert_eq!(low.union(&CpuSet::from_list("100").unwrap()), both);
        assert!(low.is_subset(&both) && !both.is_subset(&low));
    }
}
