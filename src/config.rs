//! The configuration file: options of the command line, and rules about threads. Whatever is wrong with it is an error
//! with file and line, before anything is loaded.

use std::error::Error as _;
use std::ffi::CString;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::{Arg, ArgAction, Args, Command};
use glob::Pattern;
use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

use crate::cgroup::Word;
use crate::cli::RunArgs;
use crate::machine::{Machine, gpu_named};
use crate::workload::Rule;

/// Where the file is unless the command line names another. It need not be there.
pub const USUAL: &str = "/etc/scx_stoker.toml";

/// Options that make no sense in it: those that say what to do now, and the file itself.
const NOT_IN_FILE: [&str; 3] = ["config", "monitor", "stats"];

/// What the file says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// Options, as the command line would say them.
    pub options: Vec<String>,
    /// Rules, in order.
    pub rules: Vec<Rule>,
}

/// What is wrong, and where in the text.
struct Fault {
    at: Option<Range<usize>>,
    what: String,
}

impl Config {
    /// Reads the file that was named, or else the usual one if it is there.
    ///
    /// # Errors
    /// It cannot be read, or something in it is wrong.
    pub fn read(named: Option<&Path>) -> Result<Self> {
        let file = named.unwrap_or(Path::new(USUAL));
        match std::fs::read_to_string(file) {
            Ok(text) => Self::parse(file, &text, user_id),
            Err(error) if error.kind() == ErrorKind::NotFound && named.is_none() => Ok(Self::default()),
            Err(error) => Err(error).with_context(|| {
                format!("cannot read the configuration file {}: correct it or --config", file.display())
            }),
        }
    }

    /// Understands the text of a file. `user_id` looks a user up by name.
    ///
    /// # Errors
    /// Something in it is wrong: file, line, and what would be right.
    pub fn parse(file: &Path, text: &str, user_id: impl Fn(&str) -> Option<u32>) -> Result<Self> {
        let place = |at: &Range<usize>| {
            let before = text.get(..at.start).unwrap_or(text);
            format!("{}:{}", file.display(), before.matches('\n').count() + 1)
        };
        let mut config = Self::default();
        let result = DeTable::parse(text).map_err(Fault::from).and_then(|table| {
            for (key, value) in table.into_inner() {
                match key.get_ref().as_ref() {
                    "rule" => config.rules = rules(value, &place, &user_id)?,
                    name => config.options.extend(option(name, key.span(), &value)?),
                }
            }
            Ok(())
        });
        if let Err(Fault { at, what }) = result {
            bail!("{}: {what}", at.map_or_else(|| file.display().to_string(), |at| place(&at)));
        }
        Ok(config)
    }

    /// Checks that the GPUs that rules name are here.
    ///
    /// # Errors
    /// One is not.
    pub fn check_gpus(rules: &[Rule], machine: &Machine) -> Result<()> {
        for rule in rules {
            if let Some(name) = rule.word.gpu.as_deref().filter(|name| gpu_named(&machine.gpus, name).is_none()) {
                bail!(
                    "{}: '{name}' is no GPU here: name it by index, PCI address or UUID as `scx_stoker topology` shows it",
                    rule.place
                );
            }
        }
        Ok(())
    }
}

impl From<toml::de::Error> for Fault {
    fn from(error: toml::de::Error) -> Self {
        Self { at: error.span(), what: error.message().replace('\n', ", ") }
    }
}

impl Fault {
    fn at(at: Range<usize>, what: impl Into<String>) -> Self {
        Self { at: Some(at), what: what.into() }
    }
}

/// The options that the file may set.
fn options() -> impl Iterator<Item = Arg> {
    let command = RunArgs::augment_args(Command::new("scx_stoker"));
    let args: Vec<Arg> = command.get_arguments().cloned().collect();
    args.into_iter().filter(|arg| arg.get_long().is_some_and(|name| !NOT_IN_FILE.contains(&name)))
}

/// An option as the command line would say it; none for a flag that is not set.
fn option(name: &str, key: Range<usize>, value: &Spanned<DeValue>) -> Result<Option<String>, Fault> {
    let Some(arg) = options().find(|arg| arg.get_long() == Some(name)) else {
        let known: Vec<String> = options().filter_map(|arg| arg.get_long().map(str::to_string)).collect();
        return Err(Fault::at(key, format!("there is no '{name}': there are {} and [[rule]]", known.join(", "))));
    };
    let fault = |what: String| Fault::at(value.span(), format!("{name}: {what}"));
    let is_flag = matches!(arg.get_action(), ArgAction::SetTrue);
    let text = match value.get_ref() {
        DeValue::Boolean(is_set) if is_flag => return Ok(is_set.then(|| format!("--{name}"))),
        _ if is_flag => return Err(fault("must be true or false".into())),
        DeValue::String(text) => text.to_string(),
        DeValue::Integer(number) => number.to_string(),
        DeValue::Float(number) => number.to_string(),
        other => return Err(fault(format!("must be one value, and not a {}", other.type_str()))),
    };
    let said = format!("--{name}={text}");
    // As the command line checks it.
    match Command::new("scx_stoker").arg(arg).try_get_matches_from(["scx_stoker", &said]) {
        Ok(_) => Ok(Some(said)),
        Err(error) => Err(fault(format!(
            "'{text}' is no good: {}",
            error.source().map_or_else(|| error.kind().to_string(), ToString::to_string)
        ))),
    }
}

/// A rule as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    cgroup: Option<Spanned<String>>,
    comm: Option<Spanned<String>>,
    user: Option<Spanned<User>>,
    feeder: Option<bool>,
    gpu: Option<Spanned<Name>>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected the name or the number of a user")]
enum User {
    Id(u32),
    Name(String),
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected the index, PCI address or UUID of a GPU")]
enum Name {
    Index(u32),
    Text(String),
}

fn rules(
    value: Spanned<DeValue>,
    place: &impl Fn(&Range<usize>) -> String,
    user_id: &impl Fn(&str) -> Option<u32>,
) -> Result<Vec<Rule>, Fault> {
    let at = value.span();
    let DeValue::Array(array) = value.into_inner() else {
        return Err(Fault::at(at, "'rule' must be written [[rule]], once for each"));
    };
    array.into_iter().map(|written| rule(written, place, user_id)).collect()
}

fn rule(
    value: Spanned<DeValue>,
    place: &impl Fn(&Range<usize>) -> String,
    user_id: &impl Fn(&str) -> Option<u32>,
) -> Result<Rule, Fault> {
    let at = value.span();
    let written = Written::deserialize(ValueDeserializer::from(value))?;
    if written.cgroup.is_none() && written.comm.is_none() && written.user.is_none() {
        return Err(Fault::at(at, "this rule says not whom it is about: give it cgroup, comm or user"));
    }
    if written.feeder.is_none() && written.gpu.is_none() {
        return Err(Fault::at(at, "this rule says nothing: give it feeder = true, feeder = false, or gpu"));
    }
    if let (Some(false), Some(gpu)) = (written.feeder, &written.gpu) {
        return Err(Fault::at(gpu.span(), "feeder = false and a gpu contradict each other: take one of them out"));
    }
    let user = match written.user {
        None => None,
        Some(user) => {
            let unknown = |name| format!("there is no user '{name}' here: give a name that `id` knows, or a number");
            Some(match user.get_ref() {
                User::Id(id) => *id,
                User::Name(name) => user_id(name).ok_or_else(|| Fault::at(user.span(), unknown(name)))?,
            })
        }
    };
    let gpu = written.gpu.map(|gpu| match gpu.into_inner() {
        Name::Index(index) => index.to_string(),
        Name::Text(name) => name,
    });
    Ok(Rule {
        place: place(&at),
        cgroup: written.cgroup.map(|text| pattern(&text, text.get_ref().trim_matches('/'))).transpose()?,
        comm: written.comm.as_ref().map(comm_pattern).transpose()?,
        user,
        word: Word { feeder: written.feeder, gpu },
    })
}

fn comm_pattern(written: &Spanned<String>) -> Result<Pattern, Fault> {
    /// The longest name of a thread, in bytes: the kernel's `TASK_COMM_LEN` less its NUL.
    const LONGEST: usize = 15;
    let text = written.get_ref();
    if text.len() > LONGEST && !text.contains(['*', '?', '[']) {
        let what =
            format!("no thread is called '{text}': the kernel cuts names off after {LONGEST} bytes, so give these");
        return Err(Fault::at(written.span(), what));
    }
    pattern(written, text)
}

fn pattern(written: &Spanned<String>, text: &str) -> Result<Pattern, Fault> {
    Pattern::new(text).map_err(|error| {
        let what = format!("'{text}' is no pattern: {} (at character {})", error.msg, error.pos + 1);
        Fault::at(written.span(), what)
    })
}

/// The number of a user of this machine.
fn user_id(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0; 16 * 1024];
    // SAFETY: all zeros are a passwd, and only read when the call says that it filled it.
    let mut user: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    // SAFETY: all pointers are to what lives through the call; the length is the buffer's.
    unsafe { libc::getpwnam_r(name.as_ptr(), &mut user, buffer.as_mut_ptr(), buffer.len(), &mut found) };
    (!found.is_null()).then_some(user.pw_uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config> {
        Config::parse(Path::new("/etc/a.toml"), text, |name| (name == "alice").then_some(1000))
    }

    /// What is said of a faulty file.
    fn fault(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    fn is_told(text: &str, place: &str, words: &[&str]) {
        let fault = fault(text);
        assert!(fault.starts_with(&format!("/etc/a.toml{place}: ")), "{fault}");
        assert!(words.iter().all(|word| fault.contains(word)), "{words:?} not in: {fault}");
    }

    #[test]
    fn every_option_of_the_scheduler_can_be_set_and_the_rules_keep_their_order() {
        let text = "feeder-cap = 50\nverbose = true\nnccl-topo = '/a b'\n\n[[rule]]\ncomm = 'a*'\nuser = 'alice'\n\
                    feeder = false\n\n[[rule]]\ncgroup = '/a.slice/'\nuser = 7\ngpu = 1\n";
        let config = parse(text).unwrap();
        let mut options = config.options.clone();
        options.sort();
        assert_eq!(options, ["--feeder-cap=50", "--nccl-topo=/a b", "--verbose"]);
        let pattern = |text| Some(Pattern::new(text).unwrap());
        let [first, second] = &config.rules[..] else { panic!("{config:?}") };
        assert_eq!((&first.comm, first.user, first.word.feeder), (&pattern("a*"), Some(1000), Some(false)));
        assert_eq!((&second.cgroup, second.user), (&pattern("a.slice"), Some(7)));
        assert_eq!(second.word.gpu.as_deref(), Some("1"));
        assert_eq!((first.place.as_str(), second.place.as_str()), ("/etc/a.toml:5", "/etc/a.toml:10"));
        for arg in crate::scheduler::Options::augment_args(Command::new("a")).get_arguments() {
            let name = arg.get_long().unwrap();
            assert!(options_named(name), "--{name} cannot be set");
        }
    }

    fn options_named(name: &str) -> bool {
        options().any(|arg| arg.get_long() == Some(name))
    }

    #[test]
    fn an_empty_file_says_nothing() {
        assert_eq!(parse("# nothing\n").unwrap(), Config::default());
        assert_eq!(parse("verbose = false").unwrap(), Config::default());
    }

    #[test]
    fn what_is_unknown_or_bad_is_told_with_its_line_and_what_would_be_right() {
        is_told("a = ", ":1", &[]);
        is_told("\nfeeder_cap = 50", ":2", &["feeder_cap", "feeder-cap"]);
        is_told("\n\nfeeder-cap = 500", ":3", &["500", "1..=95"]);
        is_told("slice-us = 'much'", ":1", &["slice-us", "much"]);
        is_told("slice-us = [1]", ":1", &["slice-us", "array"]);
        is_told("verbose = 1", ":1", &["true or false"]);
        is_told("monitor = 1", ":1", &["monitor"]);
        is_told("slice-us = 1000\nslice-us = 1000", ":2", &["duplicate"]);
    }

    #[test]
    fn a_rule_that_cannot_be_meant_is_told_with_its_line() {
        is_told("[rule]\ncomm = 'a'", ":1", &["[[rule]]"]);
        is_told("\n[[rule]]\nfeeder = true", ":2", &["cgroup, comm or user"]);
        is_told("\n[[rule]]\ncomm = 'a'", ":2", &["feeder = true"]);
        is_told("[[rule]]\ncomm = 'a'\nfeeder = false\ngpu = 0", ":4", &["contradict"]);
        is_told("[[rule]]\ncomm = 'a'\nfeder = false", ":3", &["feder", "feeder"]);
        is_told("[[rule]]\ncomm = 'a'\nfeeder = 'yes'", ":3", &["boolean"]);
        is_told("[[rule]]\ncomm = '[a'\nfeeder = true", ":2", &["pattern"]);
        is_told("[[rule]]\ncgroup = 'a**'\nfeeder = true", ":2", &["pattern"]);
        is_told("[[rule]]\ncomm = 'sixteen_letters_'\nfeeder = true", ":2", &["15 bytes"]);
        is_told("[[rule]]\nuser = 'bob'\nfeeder = true", ":2", &["no user 'bob'"]);
        is_told("[[rule]]\nuser = 1.5\nfeeder = true", ":2", &["user"]);
        is_told("[[rule]]\ncomm = 'a'\ngpu = true", ":3", &["PCI address"]);
    }

    #[test]
    fn the_users_of_this_machine_are_known_by_name() {
        assert_eq!(user_id("root"), Some(0));
        assert_eq!(user_id("no such user"), None);
    }

    #[test]
    fn a_file_need_not_be_there_unless_it_was_named() {
        let missing = Path::new("/nowhere/scx_stoker.toml");
        let told = format!("{:#}", Config::read(Some(missing)).unwrap_err());
        assert!(told.contains("/nowhere/scx_stoker.toml") && told.contains("--config"), "{told}");
    }

    #[test]
    fn the_file_that_is_shipped_says_nothing_and_shows_every_option_with_its_default() {
        let text = include_str!("../deploy/scx_stoker.toml");
        assert_eq!(parse(text).unwrap(), Config::default());
        // An example is a line that starts with # and no space.
        let lines = text.lines().map(|line| match line.strip_prefix('#') {
            Some(example) if !example.is_empty() && !example.starts_with(' ') => example,
            _ => line,
        });
        let shown = parse(&lines.collect::<Vec<_>>().join("\n")).unwrap();
        assert!(shown.rules.len() >= 3, "{shown:?}");
        for arg in options() {
            let name = arg.get_long().unwrap();
            assert!(text.contains(&format!("\n#{name} = ")), "{name} is not shown");
            for default in arg.get_default_values() {
                let default = format!("--{name}={}", default.to_str().unwrap());
                assert!(shown.options.contains(&default), "{default} is not shown: {:?}", shown.options);
            }
        }
    }
}
