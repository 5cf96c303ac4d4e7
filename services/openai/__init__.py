"""OpenAI's API. A body (`types`) becomes a `RequestContext`, runs as an `EngineStream` (`generation`), and leaves through an
`AnswerFormat` (`answers`), whose choices have the citations and log-probabilities of `answer_fields`.

Differences from OpenAI's service:

* Unknown and unsupported fields are refused with status 400 and the field's name. The fields of
  `ragspec.rag.openai_fields.IGNORED_FIELDS` and a message's `name` are accepted without effect.
* Missing fields take the service's settings (`generation`), not OpenAI's defaults. A prompt that does not fit beside
  `max_tokens` is refused. Passages that do not fit are dropped; `ragspec.dropped_passages` counts them.
* Additional fields: vLLM's `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos` and `cache_salt`; our
  `speculation`, `retrieval`, `conversation`, `citations`, `verbatim_quotes`, `privacy` and `metrics`. Anthropic's citations
  are a message's `content_blocks`, Cohere's its `citations`. Only trusted keys get `metrics`; other keys' answers lack the field.
* `completion_tokens` does not count rejected tokens of a prediction.
* `privacy: "strict"` streams at a fixed pace in chunks of one size, without log-probabilities.
* A stream that fails ends with an event `{"error": ...}` instead of `[DONE]`.
"""
