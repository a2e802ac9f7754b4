//! Memory of devices on its way through the host, copied once in each direction.
//!
//! An engine opens a buffer piece by piece, and a device would copy all of it for each piece.

use crate::{Buffer, Message, zeros};

/// A copy in host memory of a buffer on a device, and the buffer, to which the result goes back;
/// any other buffer as it is. So is one that does not open as it promises, which its user refuses.
pub(crate) fn to_host(buffer: Box<dyn Buffer>) -> (Box<dyn Buffer>, Option<Box<dyn Buffer>>) {
    match host_copy(&*buffer) {
        Some(copy) => (copy, Some(buffer)),
        None => (buffer, None),
    }
}

/// The packets of a message, those on devices as copies in host memory.
pub(crate) fn message_to_host(mut message: Message) -> Message {
    for packet in &mut message {
        if let Some(copy) = host_copy(&*packet.data) {
            packet.data = copy;
        }
    }
    message
}

/// A result in the memory of the device that the operand came from.
pub(crate) fn to_device(result: &dyn Buffer, operand: Box<dyn Buffer>) -> Box<dyn Buffer> {
    let mut home = operand;
    if home.len() != result.len() {
        home = home.zeros_like(result.len());
    }
    result.read(&mut |from| home.set_bytes(from));
    home
}

fn host_copy(buffer: &dyn Buffer) -> Option<Box<dyn Buffer>> {
    if !buffer.lies_on_device() {
        return None;
    }
    let mut copy = zeros(buffer.dtype(), buffer.len());
    let mut is_whole = false;
    buffer.read(&mut |from| {
        copy.write(&mut |to| {
            is_whole = from.len() == to.len();
            if is_whole {
                to.copy_from_slice(from);
            }
        });
    });
    is_whole.then_some(copy)
}
