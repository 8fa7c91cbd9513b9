"""The exchange of a call: routes, headers, lookups and pooled rows."""
