"""LanguageTool's API under /v2, and /v1/grammar, over one `Corrector`."""
