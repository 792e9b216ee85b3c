//! Proxies whose `X-Forwarded-For` is trusted, such as `10.0.0.0/8, 192.0.2.7`.

use std::{fmt, net::IpAddr, str::FromStr};

use ipnet::IpNet;

/// Networks in CIDR notation; a single address is a network of full prefix length.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrustedProxies(Vec<IpNet>);

impl TrustedProxies {
    /// An IPv4-mapped IPv6 address, as a dual-stack socket reports it, counts as IPv4.
    pub(crate) fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.iter().any(|network| network.contains(&address))
    }
}

impl FromStr for TrustedProxies {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let entries = text.split(',').map(str::trim).filter(|entry| !entry.is_empty());
        let networks: Option<_> = entries.map(network).collect();
        let expected = || "addresses or networks such as 192.0.2.7 or 10.0.0.0/8".into();
        networks.map(Self).ok_or_else(expected)
    }
}

/// Parses the address with the standard library: ipnet reads `010.0.0.0` as `10.0.0.0`, other
/// programs as octal.
fn network(text: &str) -> Option<IpNet> {
    let Some((address, length)) = text.split_once('/') else {
        return text.parse::<IpAddr>().ok().map(IpNet::from);
    };
    IpNet::new(address.parse().ok()?, length.parse().ok()?).ok()
}

impl fmt::Display for TrustedProxies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: Vec<String> = self.0.iter().map(IpNet::to_string).collect();
        f.write_str(&shown.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_contain_the_addresses_with_their_prefix() {
        let networks: TrustedProxies = "10.0.0.0/8, 192.0.2.7,2001:db8::/32,".parse().unwrap();
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
        let all: TrustedProxies = "0.0.0.0/0,::/0".parse().unwrap();
        assert!(all.contains([1, 2, 3, 4].into()) && all.contains("::1".parse().unwrap()));
        for bad in ["10.0.0.0/33", "10/8", "x", "::/129", "10.0.0.0/", "10.0.0.0/-1", "010.0.0.0/8"]
        {
            assert!(bad.parse::<TrustedProxies>().is_err(), "{bad}");
        }
    }
}
