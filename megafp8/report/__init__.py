"""Pictures and summaries from run folders."""
