"""Grammar: LanguageTool's HTTP interface under /v2, and /v1/grammar, over one corrector."""
