"""Whether a message of a chat is searched for in the documents: by signs in its words, each with a weight.

Greetings, thanks, requests about the conversation, texts to correct and small talk are not searched for. A message without such a
sign is. The weights were fitted to `pipelines/benchmarks/documentation/tuning/routing.jsonl`.

    >>> needs_documents("Thanks, that was it!"), needs_documents("Thanks! And where is the log file?")
    (False, True)
"""

import re

_MAX_READ_CHARS = 500
_COURTESY = re.compile(
    r"\W*(?:(?:nice to meet you|(?:no|any) (?:more|further|other) questions|hi|hello|hey|hallo|hola|bonjour|salut|ciao|"
    r"servus|moin|welcome|greetings|(?:good|nice) (?:morning|"
    r"afternoon|evening|night|day)|guten (?:morgen|tag|abend)|there|all|folks|everyone|thanks|thank you|thank|thx|ty|cheers|"
    r"danke(?: schön)?|merci|gracias|grazie|obrigad[oa]|tack|beaucoup|a lot|so much|very much|(?:much )?appreciated|much|"
    r"again|ok|okay|k|yes|"
    r"yeah|yep|no|nope|sure|fine|great|good|nice|cool|perfect|awesome|excellent|wonderful|super|well|right|alright|exactly|"
    r"got it|"
    r"i see|never ?mind|sorry|lol|haha|hmm|oh|bye|goodbye|tschüss|adieu|see you|later|soon|please|bitte|for now|and you|then|"
    r"so|"
    r"well done|good luck|happy new year|merry christmas|congratulations|you(?:'re| are) welcome|my friend|today|tomorrow|"
    r"go on|"
    r"continue|stop)(?!\w)\W*)+",
    re.IGNORECASE,
)
_POLITE = r"^\W*(?:(?:can|could|would|will|please)\s+(?:you\s+)?(?:please\s+)?|please\s+)?(?:help me (?:to )?)?"
_INTERCEPT = -0.5
_SIGNS = {
    "conversation": (
        4.7,
        r"\b(?:my|your) (?:\w+ )?(?:question|answer|reply|response)\b|\byour (?:\w+ )?message|\byou answer\b|\b(?:my|your|"
        r"our|the|this|that) (?:\w+ )?(?:last|first|previous|"
        r"earlier|latest) (?:\w+ )?(?:question|answer|reply|response|one|thing I)|\bof my questions|\b(?:this|"
        r"our) (?:conversation|chat|"
        r"discussion|talk)\b(?! \w+ed)|\b(?:did|have|do|had) (?:I|we) (?:just )?(?:ask|say|said|discuss|talk|tell|told|"
        r"mention|cover)|"
        r"\bwhat (?:I|we|you) (?:\w+ )?(?:said|meant|asked|discussed|told)|\bI (?:said|meant|asked|did ?n.t (?:get|"
        r"understand))|"
        r"\b(?:so far|until now|from now on|something else|once more|in other words|bullet points|in one sentence|elaborate|"
        r"like I(?:'m| am)"
        r" five|differently|mean by that)\b|^(?!.*\b(?:how|can|does|do|is) )(?:.*\b)(?:shorter|longer|simpler|briefer|"
        r"politer)\b|"
        r"\bthat(?:'s| is| makes)(?: \w+)? (?:wrong|right|sense|not (?:true|right|what))|"
        rf"{_POLITE}(?:repeat|say|explain|put|make|phrase|rephrase|summari[sz]e|shorten|simplify|turn|tell me)(?: me)? "
        r"(?:that|it|this|what|your|the (?:first|second|third|last) (?:point|part|one))\b(?! (?:an?|the|is|are|happens|"
        r"\w+ (?:is|are|does)))",
    ),
    "correction": (
        4.5,
        rf"{_POLITE}(?:correct|proof-?read|fix|check|improve|rewrite|rephrase|polish|edit|revise|spell-?check|turn|translate|"
        rf"make|add)\b[^:?]{{0,40}}"
        r"(?::|\b(?:this sentence|this text|following|my|grammar(?! file)|spelling|wording|sentences?|english|paragraph|"
        r"letter|punctuation|mistakes|"
        r"commas|this|these)\b|[\"“])|\b(?:sentence|grammar|spelling|phrase|word|english)\b[^:\"“]{0,30}(?:[:\"“]|\?\s)|"
        r"\b(?:is|which)\b[^?]{0,12}(?:[\"“]|right, ).{1,60}(?:correct|right|[\"”]\W*$)|\b(?:synonym|opposite|rhyme)s?\b|"
        r"\bhow do I say\b",
    ),
    "personal": (
        5.0,
        r"\b(?:who|what|how|where|how old|why|which model) (?:are|were) you\b(?! (?:able|supposed|allowed))|\b(?:made|"
        r"created|built) you\b|"
        r"\b(?:do|did|would|can|could|are|were|will|have) you (?:think|like|feel|live|dream|speak|remember|believe|love|hate|"
        r"prefer|enjoy|sleep|eat|"
        r"have (?:feelings|friends|a name|any plans)|hear me|see me|there|sure|real|human|a (?:human|robot|bot|machine|"
        r"person)|be|sing|play|lie|"
        r"do all|know (?:me|my)|ever)\b|\byourself\b|\byour (?:favou?rite|name|opinion|hobb|age|birthday|day|help)|"
        r"\byou(?: already| just)? (?:are|were|told|"
        r"said|did|sound|seem|made|forgot|helped)\b|\blanguages do you\b|\bcan you do\b|\bwe (?:be|are done)\b|\blet(?:'s|"
        r" us)\b|\bwhat(?:'s| is) up\b|\byou alright\b|"
        r"\bhow(?:'s| is) (?:it going|your|life|everything)\b|\bgeht['’]?s\b|\bpretend\b|\banswer in\b|"
        r"^\W*(?:I(?:'m| am| feel| love| like| hate| miss| had an?| wish)(?: so)? (?!(?:(?!going to (?:bed|sleep|"
        r"work))\w+ing|on|in|not able|unable)\b))|\b(?:bored|lonely)\b",
    ),
    "pleased": (
        2.6,
        r"\b(?:helpful|that was (?:it|exactly)|that (?:works|helps)|nice (?:to|talking)|talk to you|mistyped|reicht|"
        r"was all)\b|\bthanks?\W*$",
    ),
    "play": (
        4.1,
        r"\b(?:jokes?|riddles?|poems?|haikus?|limericks?|rhymes?|songs?|lyrics|(?:short|bedtime|funny) story|fairy ?tales?|"
        r"puns?|fun facts?|"
        r"motivation|compliments?|horoscope|something (?:interesting|funny|nice)|day is it|"
        r"name my|"
        r"so (?:hot|cold|tired)|tea or coffee|(?:an?|this) (?:e-?mail|letter) to)\b|\b\d+\s*(?:times|plus|minus|divided by|"
        r"% of|percent of|[-+*/x×÷])\s*\d+\s*\??\s*$",
    ),
    "asks": (
        -1.8,
        r"(?:^|[.!?,:]\s+|\b(?:and|but|or|so) )(?:what|which|where|when|how|why|who|whose|in which|is there|are there|does|"
        r"do|is|will|are|would|"
        r"can (?!you (?:help|please))|should|must|may|did|wie|was|wo|wann|warum|welche|comment|pourquoi|où|quel)\b|"
        r"\btell me (?:how|about|the|which)\b|\bhow to\b|\bdifference\b|\bwhether\b|^\W*(?:and|then|or)\b",
    ),
    "wants": (
        -1.7,
        r"^\W*(?:(?:please|can you|could you|would you) )*(?:show|list|explain|describe|compare|find|name|summari[sz]e|give|"
        r"look up|search|define|convert)\b "
        r"(?!me some|me (?:three|some) ideas|a name|that|it\b)",
    ),
    "identifier": (-0.7, r"(?<![\w.-])(?:--?[a-z][\w-]*|[\w-]*(?:\w[._/]\w|(?-i:[a-z][A-Z]|[A-Za-z]\d))[\w./-]*)"),
    "matter": (
        -3.3,
        r"\b(?:options?|flags?|files?|ports?|servers?|clients?|install\w*|config\w*|settings?|errors?|commands?|defaults?|"
        r"version|"
        r"packages?|logs?|daemons?|services?|pass(?:words?|phrases?)|certificates?|databases?|data|disks?|memory|network|"
        r"users?|accounts?|"
        r"parameters?|variables?|documents?|manual|reports?|backups?|archives?|rules?|polic(?:y|ies)|licen[cs]es?|limits?|"
        r"timeouts?|queues?|"
        r"scripts?|systems?|hosts?|keys?|modules?|plugins?|restart\w*|supports?|start\w*|programs?|printers?|printing|table|"
        r"page|pages|chapter|"
        r"section|values?|sizes?|formats?|syntax|example|functions?|class|method|contract|customers?|employees?|department|"
        r"invoice|warranty|"
        r"warnings?|upgrade|downgrade|scan\w*|parser?|calendars?|thread|used?|run|runs|running)\b",
    ),
    "exclaims": (2.2, r"^[^?]*!$"),
}
"""Weights above 0 speak against a search. Each sign counts once."""
_PATTERNS = {name: (weight, re.compile(pattern, re.IGNORECASE)) for name, (weight, pattern) in _SIGNS.items()}


def needs_documents(text: str) -> bool:
    """Whether a message asks for something that documents may hold."""
    if len(text) > _MAX_READ_CHARS:  # up to a whole word
        text = text[:_MAX_READ_CHARS].rpartition(" ")[0] or text[:_MAX_READ_CHARS]
    text = text.strip()
    said = text[lead.end() :] if (lead := _COURTESY.match(text)) else text
    if not re.search(r"\w", said):
        return False
    if corrected := _PATTERNS["correction"][1].search(said):
        said = said[: corrected.end()]  # Why: the words of a text to correct are no sign
    return _INTERCEPT + sum(weight for weight, pattern in _PATTERNS.values() if pattern.search(said)) <= 0.0
