"""The tier `Peer` between network namespaces, beside plain TCP across them."""
