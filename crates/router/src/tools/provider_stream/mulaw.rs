//! G.711 μ-law: 16-bit samples in one byte, with a finer resolution for quiet samples.

/// Makes the segments of the logarithmic scale begin at powers of two.
const BIAS: i32 = 0x84;
/// The largest magnitude that fits with the bias.
const MAX_MAGNITUDE: i32 = 32_635;

pub(super) fn encode(sample: i16) -> u8 {
    let sign = if sample < 0 { 0x80 } else { 0 };
    let magnitude = i32::from(sample).abs().min(MAX_MAGNITUDE) + BIAS;
    let segment = (magnitude >> 7).ilog2();
    let step = (magnitude >> (segment + 3)) & 0x0f;
    !(sign | (segment << 4) as u8 | step as u8)
}

pub(super) fn decode(byte: u8) -> i16 {
    let bits = i32::from(!byte);
    let magnitude = ((((bits & 0x0f) << 3) + BIAS) << ((bits >> 4) & 0x07)) - BIAS;
    (if bits & 0x80 == 0 { magnitude } else { -magnitude }) as i16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of the table in ITU-T G.711.
    #[test]
    fn samples_have_the_codes_of_the_standard() {
        for (sample, code) in
            [(0, 0xff), (8, 0xfe), (1_000, 0xce), (-1_000, 0x4e), (32_124, 0x80), (-32_124, 0x00)]
        {
            assert_eq!(encode(sample), code, "{sample}");
        }
        assert_eq!((encode(i16::MAX), encode(i16::MIN)), (0x80, 0x00), "beyond the range");
    }

    #[test]
    fn a_decoded_byte_has_the_same_code_again() {
        for byte in 0..=u8::MAX {
            // Both zeros decode to 0, which has one code.
            let code = if byte == 0x7f { 0xff } else { byte };
            assert_eq!(encode(decode(byte)), code);
        }
    }

    #[test]
    fn the_error_is_a_few_percent_of_the_sample() {
        for sample in (i16::MIN..=i16::MAX).step_by(7) {
            let error = (i32::from(decode(encode(sample))) - i32::from(sample)).abs();
            assert!(error <= 8 + i32::from(sample).abs() / 25, "{sample}");
        }
    }
}
