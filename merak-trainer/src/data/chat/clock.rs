//! The local time as `strftime` of C writes it, which Python's `strftime` calls.
#![expect(unsafe_code, reason = "functions of C")]

use std::ffi::CString;
use std::mem::MaybeUninit;
use std::time::{SystemTime, UNIX_EPOCH};

/// A moment in the time zone of the machine.
#[derive(Debug, Clone, Copy)]
pub(super) struct LocalTime {
    seconds: libc::time_t,
}

impl LocalTime {
    /// The present moment.
    pub(super) fn now() -> Self {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            seconds: since_1970.map_or(0, |time| time.as_secs().cast_signed()),
        }
    }

    /// The moment in this format, as `"%d %b %Y"`.
    ///
    /// # Errors
    ///
    /// The format has a zero byte, or the text more than 1,024 bytes.
    pub(super) fn format(&self, format: &str) -> Result<String, String> {
        const ROOM: usize = 1024;
        // C returns 0 for too little room and for an empty text; no text is empty with a space.
        let c_format = CString::new(format!("{format} "))
            .map_err(|_| format!("the format of a time has a zero byte: {format:?}"))?;
        let mut text = vec![0_u8; ROOM];
        let mut fields = MaybeUninit::zeroed();
        // SAFETY: the function reads one number and writes one `tm`.
        unsafe { libc::localtime_r(&raw const self.seconds, fields.as_mut_ptr()) };
        // SAFETY: `text` has `ROOM` bytes; the format and the fields, for which all bits zero are a
        // value too, outlive the call.
        let len = unsafe {
            libc::strftime(
                text.as_mut_ptr().cast(),
                ROOM,
                c_format.as_ptr(),
                fields.as_ptr(),
            )
        };
        if len == 0 {
            return Err(format!(
                "the time in the format {format:?} has more than {ROOM} bytes"
            ));
        }
        text.truncate(len - 1);
        String::from_utf8(text).map_err(|error| format!("the time in {format:?}: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_reads_as_its_format_says() {
        let now = LocalTime::now();
        let date = now.format("%d %b %Y").unwrap();
        let parts: Vec<&str> = date.split(' ').collect();
        assert_eq!(
            parts.iter().map(|part| part.len()).collect::<Vec<_>>(),
            [2, 3, 4]
        );
        assert_eq!(now.format("").unwrap(), "");
        assert_eq!(now.format("%% déjà").unwrap(), "% déjà");
        assert!(now.format("a\0b").unwrap_err().contains("zero byte"));
        let long = now.format(&"%Y".repeat(300)).unwrap_err();
        assert!(long.contains("more than 1024 bytes"), "{long}");
    }
}
