"""The one evaluation engine: plan, feed, ledger, journal, control plane and the loop that joins them."""
