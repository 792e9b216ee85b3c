//! Networks: who is meant by `10.0.0.0/8, 192.0.2.7`.

use std::{fmt, net::IpAddr, str::FromStr};

/// Addresses, one by one or by what they begin with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Networks(Vec<(IpAddr, u8)>);

impl Networks {
    pub fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.iter().any(|(network, length)| begins_with(address, *network, *length))
    }
}

fn begins_with(address: IpAddr, network: IpAddr, length: u8) -> bool {
    let same =
        |a: u128, b: u128, bits: u8| (a ^ b).checked_shr((bits - length).into()).unwrap_or(0) == 0;
    match (address, network) {
        (IpAddr::V4(a), IpAddr::V4(b)) => same(a.to_bits().into(), b.to_bits().into(), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => same(a.to_bits(), b.to_bits(), 128),
        _ => false,
    }
}

impl FromStr for Networks {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let one = |entry: &str| {
            let wrong = || "addresses or networks such as 192.0.2.7 or 10.0.0.0/8".to_owned();
            let (address, length) = match entry.split_once('/') {
                None => (entry, None),
                Some((address, length)) => (address, Some(length.parse().map_err(|_| wrong())?)),
            };
            let address: IpAddr = address.parse().map_err(|_| wrong())?;
            let most = if address.is_ipv4() { 32 } else { 128 };
            let length = length.unwrap_or(most);
            if length <= most { Ok((address, length)) } else { Err(wrong()) }
        };
        let entries = text.split(',').map(str::trim).filter(|entry| !entry.is_empty());
        entries.map(one).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for Networks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: Vec<String> =
            self.0.iter().map(|(it, length)| format!("{it}/{length}")).collect();
        f.write_str(&shown.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_hold_what_begins_as_they_do() {
        let networks: Networks = "10.0.0.0/8, 192.0.2.7,2001:db8::/32,".parse().unwrap();
        for (address, is_in) in [
            ("10.255.1.2", true),
            ("::ffff:10.1.2.3", true),
            ("11.0.0.1", false),
            ("192.0.2.7", true),
            ("192.0.2.6", false),
            ("2001:db8:1::1", true),
            ("2001:db9::1", false),
        ] {
            assert_eq!(networks.contains(address.parse().unwrap()), is_in, "{address}");
        }
        assert_eq!(networks.to_string(), "10.0.0.0/8,192.0.2.7/32,2001:db8::/32");
        let all: Networks = "0.0.0.0/0,::/0".parse().unwrap();
        assert!(all.contains([1, 2, 3, 4].into()) && all.contains("::1".parse().unwrap()));
        for bad in ["10.0.0.0/33", "10/8", "x", "::/129", "10.0.0.0/", "10.0.0.0/-1"] {
            assert!(bad.parse::<Networks>().is_err(), "{bad}");
        }
    }
}
