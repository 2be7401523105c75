"""The words of the default pairs: what goes with what, and the forms that they take.

In all tables `English = Italian` stand side by side. Where a table says who or what, it names
nouns or kinds of nouns.
"""

import re
from functools import cache
from typing import NamedTuple

# Entries stand two spaces or more apart. singular/plural = singolare/plurale gender, where regular
# plurals are left out and `-` is none. `mf`: one egg is masculine, two are feminine.
NOUNS = {
    "kin": """
        mother/- = madre f        father/- = padre m          sister = sorella f
        brother = fratello m      uncle = zio/zii m""",
    "acquaintance": """
        friend = amico/amici m    doctor = medico/medici m    teacher = maestra f""",
    "stranger": """
        man/men = uomo/uomini m   woman/women = donna f       boy = ragazzo m
        girl = ragazza f          child/children = bambino m  student = studente m
        nurse = infermiera f""",
    "animal": """
        dog = cane m              cat = gatto m               bird = uccello m
        mouse/mice = topo m       squirrel = scoiattolo m""",
    "fruit": "apple = mela f      orange = arancia/arance f   egg = uovo/uova mf",
    "dish": "bread/- = pane m     cheese/- = formaggio m      fish/- = pesce m",
    "drink": "water/- = acqua f   milk/- = latte m            coffee/- = caffè m",
    "text": "book = libro m       letter = lettera f          newspaper = giornale m",
    "outfit": """
        hat = cappello m          shoe = scarpa f             bag = borsa f
        backpack = zaino m        umbrella = ombrello m""",
    "object": """
        key = chiave f            knife/knives = coltello m   mirror = specchio m
        photo = foto/foto f       watch = orologio m""",
    "furniture": "table = tavolo m    chair = sedia f",
    "opening": "door = porta f    window = finestra f         wardrobe = armadio m",
    "home": "house = casa f       garden = giardino m         room = stanza f",
    "sight": """
        park = parco m            island = isola f            city = città f
        museum = museo m""",
    "building": """
        station/- = stazione f    hospital/- = ospedale m     school/- = scuola f
        zoo/- = zoo m             hotel/- = albergo m""",
    "plant": "tree = albero m",
}
PEOPLE = "kin acquaintance stranger"

# What each is said of. They stand after the noun, or after a form of to be.
ADJECTIVES = {
    "tall = alto": PEOPLE,
    "kind = gentile": PEOPLE,
    "strong = forte": PEOPLE,
    "young = giovane": "acquaintance stranger",
    "rich = ricco": "acquaintance stranger",
    "big = grande": "animal fruit outfit object furniture opening home sight building plant",
    "small = piccolo": "animal fruit outfit object furniture opening home sight building plant",
    "black = nero": "animal outfit furniture opening",
    "white = bianco": "animal outfit furniture opening",
    "red = rosso": "outfit furniture opening",
    "blue = blu": "outfit furniture opening",
    "green = verde": "outfit furniture opening",
    "new = nuovo": "text outfit object furniture opening home building",
    "old = vecchio": "animal text outfit object furniture opening home building plant",
    "long = lungo": "book letter",
    "interesting = interessante": "text city museum",
    "fresh = fresco": "fruit dish",
    "cold = freddo": "drink",
    "hot = caldo": "drink",
}
# These stand after a form of to be only.
STATES = {
    "happy = felice": PEOPLE,
    "sad = triste": PEOPLE,
    "tired = stanco": "stranger sister nurse teacher",
    "closed = chiuso": "opening bag museum school",
    "open = aperto": "opening bag museum school",
    "clean = pulito": "outfit furniture window home",
    "dirty = sporco": "outfit furniture window home",
}

# Italian has hunger, thirst, ...: the feeling, and what one does about it.
FEELINGS = {
    "hungry = fame": ("eat/ate = mangiare", "fruit dish"),
    "thirsty = sete": ("drink/drank = bere/bevuto", "drink"),
    "cold = freddo": ("close = chiudere/chiuso", "door window"),
    "hot = caldo": ("open = aprire/aperto", "door window"),
}

# Who, base/past = infinito/participio, what. What is regular is left out.
ACTIONS = [
    (PEOPLE + " animal", "eat/ate = mangiare", "fruit dish"),
    (PEOPLE, "drink/drank = bere/bevuto", "drink"),
    (PEOPLE, "read/read = leggere/letto", "text"),
    (PEOPLE, "write/wrote = scrivere/scritto", "book letter"),
    (PEOPLE, "buy/bought = comprare", "fruit dish drink text outfit object furniture house"),
    (PEOPLE, "find/found = trovare", "text outfit object animal"),
    (PEOPLE, "lose/lost = perdere/perso", "text outfit object"),
    (PEOPLE, "look for = cercare", "text outfit object acquaintance animal hotel"),
    (PEOPLE + " animal", "see/saw = vedere/visto", PEOPLE + " animal plant"),
    (PEOPLE, "wait for = aspettare", PEOPLE),
    (PEOPLE, "help = aiutare", PEOPLE),
    (PEOPLE, "clean = pulire", "outfit furniture opening home mirror"),
    (PEOPLE, "open = aprire/aperto", "opening letter bag backpack umbrella"),
    (PEOPLE, "close = chiudere/chiuso", "opening book bag backpack umbrella"),
    (PEOPLE, "visit = visitare", "sight school hospital zoo"),
]
# These stand in the present, without a time.
HABITS = [
    (PEOPLE, "have/had = avere", "animal outfit object house garden"),
    (PEOPLE, "know/knew = conoscere", "acquaintance stranger sight hotel"),
    (PEOPLE, "come = venire", "from = da", "building sight"),
]
GIFTS = [
    (PEOPLE, "give/gave = dare", "text outfit object fruit"),
    (PEOPLE, "show/showed = mostrare", "text outfit object house"),
]
STAYS = [
    (PEOPLE, "sleep/slept = dormire", "in = in", "room hotel"),
    ("animal", "sleep/slept = dormire", "in = in", "garden room"),
    ("kin acquaintance nurse", "work = lavorare", "in = in", "garden hospital school museum hotel"),
    ("child boy girl student dog cat", "play = giocare", "in = in", "garden park room"),
    (PEOPLE, "walk = camminare", "in = in", "garden park city"),
    (PEOPLE, "wait = aspettare", "in front of = davanti a", "building museum house"),
]
# The past of these has essere, and would agree with the subject: it is left out.
WAYS = [(PEOPLE, "go = andare", "to = a", "building museum park")]
LOCATIONS = [
    ("text outfit object fruit", "on = su", "furniture"),
    ("text outfit object animal", "under = sotto", "furniture tree"),
    ("text outfit object fruit", "in = in", "bag backpack wardrobe"),
    (PEOPLE + " animal furniture", "near = vicino a", "opening tree"),
    (PEOPLE + " animal", "behind = dietro", "door wardrobe tree house"),
    (PEOPLE + " animal", "in = in", "garden park room"),
    (PEOPLE, "in front of = davanti a", "building museum"),
]

TIMES = {
    "present": [
        "every day = ogni giorno",
        "every morning = ogni mattina",
        "in the evening = la sera",
        "on Sundays = la domenica",
        "in winter = in inverno",
        "when it rains = quando piove",
    ],
    "past": [
        "yesterday = ieri",
        "yesterday evening = ieri sera",
        "this morning = questa mattina",
        "two days ago = due giorni fa",
        "last week = la settimana scorsa",
    ],
    "can": [
        "today = oggi",
        "tomorrow = domani",
        "this evening = questa sera",
        "now = adesso",
    ],
}
TIMES["must"] = TIMES["want"] = TIMES["can"]

# Masculine and feminine; three forms stand before a consonant / s + consonant, z, ... / a vowel.
SINGULAR = {
    "the": ("il/lo/l'", "la/la/l'"),
    "a": ("un/uno/un", "una/una/un'"),
    "this": ("questo/questo/quest'", "questa/questa/quest'"),
    "that": ("quel/quello/quell'", "quella/quella/quell'"),
    "some": ("del/dello/dell'", "della/della/dell'"),
    "every": ("ogni", "ogni"),
    "my": ("il mio", "la mia"),
    "your": ("il tuo", "la tua"),
    "our": ("il nostro", "la nostra"),
    "": ("", ""),
}
PLURAL = {
    "the": ("i/gli/gli", "le"),
    "all the": ("tutti i/tutti gli/tutti gli", "tutte le"),
    "these": ("questi", "queste"),
    "those": ("quei/quegli/quegli", "quelle"),
    "some": ("alcuni", "alcune"),
    "many": ("molti", "molte"),
    "two": ("due", "due"),
    "my": ("i miei", "le mie"),
    "your": ("i tuoi", "le tue"),
    "our": ("i nostri", "le nostre"),
    "": ("", ""),
}
POSSESSIVES = ["my", "your", "our"]
CONTRACTED = {"a": "a", "da": "da", "di": "de", "in": "ne", "su": "su"}
ENDINGS = {"il": "l", "lo": "llo", "la": "lla", "l'": "ll'", "i": "i", "gli": "gli", "le": "lle"}

IRREGULAR = {
    "essere": "sono sei è siamo sono",
    "avere": "ho hai ha abbiamo hanno",
    "andare": "vado vai va andiamo vanno",
    "venire": "vengo vieni viene veniamo vengono",
    "dare": "do dai dà diamo danno",
    "bere": "bevo bevi beve beviamo bevono",
    "pulire": "pulisco pulisci pulisce puliamo puliscono",
    "potere": "posso puoi può possiamo possono",
    "dovere": "devo devi deve dobbiamo devono",
    "volere": "voglio vuoi vuole vogliamo vogliono",
    "piacere": "piaccio piaci piace piacciamo piacciono",
}
PRONOUNS = {"I": "", "you": "", "he": "lui", "she": "lei", "we": "", "they": "loro"}
TO_PRONOUNS = {"I": "mi", "you": "ti", "he": "gli", "she": "le", "we": "ci", "they": "a loro"}


class Noun(NamedTuple):
    english: str
    english_plural: str
    italian: str
    italian_plural: str
    gender: str
    kind: str


class Verb(NamedTuple):
    english: str
    past: str
    italian: str
    participle: str


class Phrase(NamedTuple):
    english: str
    italian: str
    person: str = ""  # the pronoun that could stand for it
    feminine: bool = False


def entries(table: str) -> list[str]:
    return re.split(r"\s{2,}", table.strip())


def both(entry: str) -> Phrase:
    """`English = Italian` in two parts."""
    return Phrase(*entry.split(" = "))


def add_s(word: str) -> str:
    """A noun's plural or a verb's third person: keys, watches, cities; has, goes."""
    if word == "have":
        return "has"
    if re.search("[^aeiou]y$", word):
        return word[:-1] + "ies"
    return word + ("es" if re.search("(s|x|ch|sh|go)$", word) else "s")


def pluralise(word: str) -> str:
    """An Italian noun's or adjective's plural: libri, case, chiavi, parchi, specchi, città."""
    endings = ("io i", "co chi", "go ghi", "ca che", "ga ghe", "o i", "a e", "e i")
    for singular, plural in map(str.split, endings):
        if word.endswith(singular):
            return word.removesuffix(singular) + plural
    return word


def agree(adjective: str, feminine: bool, plural: bool) -> str:
    """bianco, bianca, bianchi, bianche"""
    if feminine and adjective.endswith("o"):
        adjective = adjective[:-1] + "a"
    return pluralise(adjective) if plural else adjective


def determiner(english: str, plural: bool, feminine: bool, noun: str) -> str:
    """What stands before the Italian noun for `the`, `a`, `this`, `all the`, ..."""
    forms = (PLURAL if plural else SINGULAR)[english][feminine].split("/")
    before_vowel = noun[0] in "aeiou"
    before_cluster = re.match("s[^aeiou]|z|gn|ps|x|y", noun) is not None
    return (forms * 3)[2 if before_vowel else before_cluster]


def join(*words: str) -> str:
    """Italian words with blanks between them, but for the apostrophe's: l'amico."""
    return " ".join(filter(None, words)).replace("' ", "'")


def contract(preposition: str, phrase: str) -> str:
    """a + il medico = al medico, davanti a + la casa = davanti alla casa; sotto il letto."""
    before, _, last = preposition.rpartition(" ")
    article = re.match("(l'|(il|lo|la|i|gli|le) )", phrase)
    if last in CONTRACTED and article:
        phrase = phrase[article.end() :]
        last = CONTRACTED[last] + ENDINGS[article[0].strip()]
    elif last == "a" and phrase.startswith("a"):
        last = "ad"
    return join(before, last, phrase)


def conjugate(infinitive: str, person: str) -> str:
    """The Italian present. You is one person."""
    index = ["I", "you", "he", "we", "they"].index("he" if person == "she" else person)
    if infinitive in IRREGULAR:
        return IRREGULAR[infinitive].split()[index]
    stem, ending = infinitive[:-3], infinitive[-3:]
    ending = {"are": "o i a iamo ano"}.get(ending, "o i e iamo ono").split()[index]
    if infinitive.endswith("care") and ending[0] == "i":
        stem += "h"  # cerchi
    if stem[-1] == ending[0] == "i":
        stem = stem[:-1]  # mangi
    return stem + ending


def parse_noun(entry: str, kind: str) -> Noun:
    english, italian, gender = re.fullmatch("(.+) = (.+) (.+)", entry).groups()
    english, _, english_plural = english.partition("/")
    italian, _, italian_plural = italian.partition("/")
    english_plural = english_plural or add_s(english)
    return Noun(
        english, english_plural, italian, italian_plural or pluralise(italian), gender, kind
    )


def parse_verb(entry: str) -> Verb:
    english, italian = both(entry)[:2]
    english, _, past = english.partition("/")
    italian, _, participle = italian.partition("/")
    head, *rest = english.split()
    past = past or " ".join([head.removesuffix("e") + "ed", *rest])
    regular = italian[:-3] + {"are": "ato", "ere": "uto", "ire": "ito"}[italian[-3:]]
    return Verb(english, past, italian, participle or regular)


ALL_NOUNS = [parse_noun(entry, kind) for kind, table in NOUNS.items() for entry in entries(table)]


@cache
def find_nouns(what: str) -> list[Noun]:
    """All nouns of these kinds and words."""
    return [noun for noun in ALL_NOUNS if {noun.kind, noun.english} & set(what.split())]


@cache
def find_adjectives(noun: Noun) -> list[Phrase]:
    return [both(entry) for entry, what in ADJECTIVES.items() if noun in find_nouns(what)]
