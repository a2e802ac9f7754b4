//! Parts of flat buffers, copied and added where they lie.

use super::{
    super::parts::{self, NODE},
    Tch, at,
    optimizer::{own, own_mut},
    storage::{TchBuffer, int, kind_of},
};
use crate::{Result, TensorType};
use merak_mpu::{Buffer, DType};
use std::{any::Any, ops::Range};
use tch::{TchError, Tensor};

impl Tch {
    /// Whether a buffer is one of this backend, in the memory of its device.
    pub fn holds(&self, buffer: &dyn Buffer) -> bool {
        let any: &dyn Any = buffer;
        let own = any.downcast_ref::<TchBuffer>();
        own.is_some_and(|own| own.flat.device() == self.device)
    }

    /// Adds values that lie end to end to parts of a buffer of this backend.
    ///
    /// # Errors
    /// As [`Backend::put_parts`](crate::Backend::put_parts).
    pub fn add_parts(
        &self,
        values: &dyn Buffer,
        to: &mut dyn Buffer,
        parts: &[Range<usize>],
    ) -> Result<()> {
        self.change_parts(values, to, parts, |part, values| {
            part.f_add_(values).map(drop)
        })
    }

    /// Multiplies all elements of a buffer of this backend.
    ///
    /// # Errors
    /// When the buffer is another backend's, or libtorch fails.
    pub fn multiply(&self, values: &mut dyn Buffer, factor: f32) -> Result<()> {
        self.enter();
        let values = own_mut(values)?;
        let _ = (values.flat)
            .f_mul_scalar_(f64::from(factor))
            .map_err(at(NODE))?;
        values.renew()
    }

    /// Lets `change` see parts of a buffer of this backend, each with its values.
    pub(super) fn change_parts(
        &self,
        values: &dyn Buffer,
        to: &mut dyn Buffer,
        parts: &[Range<usize>],
        change: impl Fn(&mut Tensor, &Tensor) -> Result<(), TchError>,
    ) -> Result<()> {
        self.enter();
        let to = own_mut(to)?;
        parts::check_put(values, to, parts)?;
        let values = self.here(values)?;
        let mut start = 0;
        for part in parts {
            let changed = view(&to.flat, part).and_then(|mut view| {
                change(&mut view, &values.f_narrow(0, start, int(part.len()))?)
            });
            changed.map_err(at(NODE))?;
            to.renew_part(part.clone())?;
            start += int(part.len());
        }
        Ok(())
    }

    /// The elements of a buffer on the device of this backend.
    fn here(&self, buffer: &dyn Buffer) -> Result<Tensor> {
        if self.holds(buffer) {
            return Ok(own(buffer)?.flat.shallow_clone());
        }
        let ty = TensorType::new([buffer.len()], buffer.dtype());
        let mut tensor = None;
        buffer.read(&mut |bytes| tensor = Some(self.upload(&ty, bytes)));
        tensor.expect("a buffer calls the closure once")
    }

    pub(super) fn copied(
        &self,
        from: &dyn Buffer,
        parts: &[Range<usize>],
        dtype: DType,
    ) -> Result<Box<dyn Buffer>> {
        if !self.holds(from) {
            let copy = parts::copy(from, parts, dtype)?;
            return Ok(Box::new(TchBuffer::new(self.here(&*copy)?, dtype)));
        }
        parts::check_copy(from, parts, dtype)?;
        self.enter();
        let flat = &own(from)?.flat;
        let kind = kind_of(&TensorType::new([0], dtype))?;
        let copy = || {
            let views = parts.iter().map(|part| view(flat, part));
            let views = views.collect::<Result<Vec<_>, _>>()?;
            match &views[..] {
                [] => Tensor::f_empty(0, (kind, flat.device())),
                [one] if kind != flat.kind() => one.f_to_kind(kind),
                // It copies a single tensor too.
                all => Tensor::f_cat(all, 0)?.f_to_kind(kind),
            }
        };
        let copy = copy().map_err(at(NODE))?;
        Ok(Box::new(TchBuffer::new(copy, dtype)))
    }

    pub(super) fn placed(
        &self,
        from: &dyn Buffer,
        part: Range<usize>,
        dtype: DType,
        (at_element, len): (usize, usize),
    ) -> Result<Box<dyn Buffer>> {
        parts::check_place(from, &part, dtype, (at_element, len))?;
        self.enter();
        let kind = kind_of(&TensorType::new([0], dtype))?;
        let place = at_element..at_element + part.len();
        let own = if self.holds(from) {
            view(&own(from)?.flat, &part)
        } else {
            Ok(self.here(&*parts::copy(from, &[part], dtype)?)?)
        };
        let placed = own.and_then(|own| {
            let all = Tensor::f_empty(int(len), (kind, self.device))?;
            view(&all, &place)?.f_copy_(&own)?;
            Ok(all)
        });
        Ok(Box::new(TchBuffer::new(placed.map_err(at(NODE))?, dtype)))
    }
}

fn view(flat: &Tensor, part: &Range<usize>) -> Result<Tensor, TchError> {
    flat.f_narrow(0, int(part.start), int(part.len()))
}

#[cfg(test)]
#[expect(
    clippy::single_range_in_vec_init,
    reason = "lists of ranges, some of which have one"
)]
mod tests {
    use super::*;
    use crate::{
        Backend, Init, Param, ParamRole,
        backend::{candle::Candle, tch::TchDevice},
    };
    use half::bf16;

    fn values<T: merak_mpu::Element>(buffer: Box<dyn Buffer>) -> Vec<T> {
        merak_mpu::into_vec(buffer).unwrap()
    }

    fn numbers(len: usize) -> Vec<f32> {
        (0..len).map(|i| (i * 37 % 23) as f32 / 7.0 - 1.0).collect()
    }

    /// A buffer of the backend with these numbers.
    fn buffer(tch: &Tch, numbers: &[f32]) -> Box<dyn Buffer> {
        let mut buffer = tch.grad_buffer(DType::F32, numbers.len()).unwrap();
        buffer.write(&mut |bytes| bytes.copy_from_slice(bytemuck::cast_slice(numbers)));
        buffer
    }

    #[test]
    fn parts_are_copied_alike_from_memory_of_the_backend_and_of_the_host() {
        let tch = Tch::new(TchDevice::Cpu, 1).unwrap();
        let (candle, host) = (Candle::new(1).unwrap(), numbers(40));
        let own = buffer(&tch, &host);
        for parts in [vec![3..9], vec![0..1, 9..9, 30..40], vec![]] {
            let wide: Vec<f32> = parts
                .iter()
                .cloned()
                .flat_map(|part| host[part].to_vec())
                .collect();
            for from in [&host as &dyn Buffer, &*own] {
                for backend in [&tch as &dyn Backend, &candle] {
                    let copy = backend.copy_parts(from, &parts, DType::F32).unwrap();
                    assert_eq!(values::<f32>(copy), wide);
                    let narrow = backend.copy_parts(from, &parts, DType::BF16).unwrap();
                    let expected: Vec<_> = wide.iter().map(|&x| bf16::from_f32(x)).collect();
                    assert_eq!(values::<bf16>(narrow), expected);
                }
                assert!(tch.holds(&*tch.copy_parts(from, &parts, DType::F32).unwrap()));
            }
        }
        assert!(!tch.holds(&host));
        let error = tch.copy_parts(&*own, &[0..3], DType::I64).unwrap_err();
        assert!(
            error.to_string().contains("of f32 do not become i64"),
            "{error}"
        );
    }

    #[test]
    fn a_part_has_its_place_in_a_buffer_for_a_gather() {
        let tch = Tch::new(TchDevice::Cpu, 1).unwrap();
        let (candle, host) = (Candle::new(1).unwrap(), numbers(40));
        let own = buffer(&tch, &host);
        for from in [&host as &dyn Buffer, &*own] {
            for backend in [&tch as &dyn Backend, &candle] {
                for (part, at, len) in [(3..9, 4, 10), (0..40, 0, 40), (7..7, 5, 5)] {
                    let gather = |dtype| backend.gather_buffer(from, part.clone(), dtype, at, len);
                    let place = at..at + part.len();
                    let wide = values::<f32>(gather(DType::F32).unwrap());
                    assert_eq!(wide.len(), len);
                    assert_eq!(wide[place.clone()], host[part.clone()]);
                    let narrow = values::<bf16>(gather(DType::BF16).unwrap());
                    assert_eq!(narrow.len(), len);
                    let expected = host[part.clone()].iter().map(|&x| bf16::from_f32(x));
                    assert_eq!(narrow[place], expected.collect::<Vec<_>>());
                }
                let refused = |part, dtype, at, len, reason: &str| {
                    let refused = backend.gather_buffer(from, part, dtype, at, len);
                    let error = refused.unwrap_err().to_string();
                    assert!(error.contains(reason), "{error}");
                };
                let wide = DType::F32;
                refused(3..9, wide, 5, 10, "3..9 do not fit at 5 of 10 elements");
                refused(3..9, wide, 11, 10, "3..9 do not fit at 11 of 10");
                refused(36..41, wide, 0, 10, "of 40 elements have no 36..41");
                refused(3..9, DType::I64, 0, 10, "of f32 do not become i64");
            }
        }
    }

    #[test]
    fn a_copy_shares_no_memory_with_its_buffer() {
        let tch = Tch::new(TchDevice::Cpu, 1).unwrap();
        let own = buffer(&tch, &numbers(8));
        let mut copy = tch.copy_parts(&*own, &[0..8], DType::F32).unwrap();
        copy.clear();
        assert_eq!(values::<f32>(own), numbers(8));
    }

    #[test]
    fn parts_are_put_added_and_multiplied_as_their_elements_would_be() {
        let tch = Tch::new(TchDevice::Cpu, 1).unwrap();
        let parts = [2..5, 7..7, 10..12];
        for own in [true, false] {
            let new: Box<dyn Buffer> = if own {
                buffer(&tch, &[1.0, 2.0, 3.0, 4.0, 5.0])
            } else {
                Box::new(vec![1.0_f32, 2.0, 3.0, 4.0, 5.0])
            };
            let (mut put, mut added) = (numbers(13), numbers(13));
            for (i, x) in [2, 3, 4, 10, 11].into_iter().zip([1.0, 2.0, 3.0, 4.0, 5.0]) {
                put[i] = x;
                added[i] += x;
            }
            let mut found = buffer(&tch, &numbers(13));
            tch.put_parts(&*new, &mut *found, &parts).unwrap();
            assert_eq!(values::<f32>(found), put);
            let mut host = numbers(13);
            let candle = Candle::new(1).unwrap();
            candle.put_parts(&*new, &mut host, &parts).unwrap();
            assert_eq!(host, put);
            let mut found = buffer(&tch, &numbers(13));
            tch.add_parts(&*new, &mut *found, &parts).unwrap();
            tch.multiply(&mut *found, 0.3).unwrap();
            let scaled: Vec<_> = added.iter().map(|x| x * 0.3).collect();
            assert_eq!(values::<f32>(found), scaled);
            let refused = |parts: &[Range<usize>], reason: &str| {
                let (mut found, mut host) = (buffer(&tch, &numbers(13)), numbers(13));
                for error in [
                    tch.put_parts(&*new, &mut *found, parts).unwrap_err(),
                    candle.put_parts(&*new, &mut host, parts).unwrap_err(),
                ] {
                    assert!(error.to_string().contains(reason), "{error}");
                }
            };
            refused(&[0..4], "of 4 elements got 5");
            refused(&[2..5, 12..14], "of 13 elements have no 12..14");
        }
    }

    #[test]
    fn a_16_bit_copy_of_masters_follows_their_parts() {
        let tch = Tch::new(TchDevice::Cpu, 1).unwrap();
        let ty = TensorType::new([6], DType::BF16);
        let param = Param::new("weight", ty, Init::Constant(0.0), ParamRole::Weight);
        let mut store = tch.param_store(&[param], &[0], 6).unwrap();
        tch.put_parts(&vec![1.5_f32, 2.5], &mut *store.flat, &[1..2, 4..5])
            .unwrap();
        let view = tch.into_buffer(store.views.swap_remove(0)).unwrap();
        let expected = [0.0, 1.5, 0.0, 0.0, 2.5, 0.0].map(bf16::from_f32);
        assert_eq!(values::<bf16>(view), expected);
    }
}
