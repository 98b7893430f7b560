//! What both XML readers need.

use anyhow::{Context, Result};
use quick_xml::events::BytesStart;

/// The value of an attribute, if the tag has it.
///
/// # Errors
/// Broken XML.
pub fn attribute(tag: &BytesStart<'_>, name: &str) -> Result<Option<String>> {
    let attribute = tag.try_get_attribute(name).context("broken attribute")?;
    attribute.map(|attribute| Ok(attribute.unescape_value()?.into_owned())).transpose()
}
