"""The default pairs: right in both languages, and the same list everywhere."""

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from translation.grammar import BE, NEVER, Author, clause, default_pairs, noun_phrase
from translation.words import (
    ALL_NOUNS,
    PLURAL,
    SINGULAR,
    Phrase,
    add_s,
    agree,
    both,
    conjugate,
    contract,
    find_nouns,
    parse_verb,
)

ROOT = Path(__file__).parents[2]
DIGEST = "3e69e335f523c066738adde6eb05fa454aad19025c1a05ab37ba77cffb5705b9"
SOME = """
There is a student in front of this school.
    C'è uno studente davanti a questa scuola.
The backpack is in the wardrobes.
    Lo zaino è negli armadi.
Some women like those interesting books.
    Ad alcune donne piacciono quei libri interessanti.
The nurse never closes the doors.
    L'infermiera non chiude mai le porte.
I give a hat to the rich man's father.
    Do un cappello al padre dell'uomo ricco.
The woman eats your eggs because she is hungry.
    La donna mangia le tue uova perché ha fame.
We come from the big zoo.
    Veniamo dallo zoo grande.
Is that photo on the tables?
    Quella foto è sui tavoli?
Yesterday he lost some knives.
    Ieri lui ha perso alcuni coltelli.
Do you like big eggs?
    Ti piacciono le uova grandi?
Does my mother like new hats?
    A mia madre piacciono i cappelli nuovi?
That student walks in the garden but my mother does not buy the bread.
    Quello studente cammina nel giardino ma mia madre non compra il pane.
I am near the tree.
    Sono vicino all'albero.
They are cold today.
    Loro hanno freddo oggi.
Our father waits for that nurse while the women visit these museums.
    Nostro padre aspetta quell'infermiera mentre le donne visitano questi musei.
"""


@pytest.fixture(scope="module")
def pairs():
    return default_pairs()


def words_of(text):
    return re.findall(r"\w+'?", text.lower())


def test_each_sentence_has_one_translation(pairs):
    assert len(pairs) == 12_000
    assert len({english for english, _ in pairs}) == 12_000
    assert len({italian for _, italian in pairs}) == 12_000
    # Nor do two pairs that were made at different times contradict each other.
    author = Author(seed=1)
    forth, back = dict(pairs), {italian: english for english, italian in pairs}
    for english, italian in (author.pair() for _ in range(5_000)):
        assert forth.setdefault(english, italian) == italian
        assert back.setdefault(italian, english) == english


def test_the_list_is_the_same_everywhere(pairs):
    digest = hashlib.sha256(repr(pairs).encode()).hexdigest()
    assert digest == DIGEST
    program = (
        "import hashlib; from translation.grammar import default_pairs;"
        "print(hashlib.sha256(repr(default_pairs()).encode()).hexdigest())"
    )
    env = os.environ | {"PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == digest


def test_each_word_comes_often_enough_to_be_learnt(pairs):
    for language, fewest in enumerate([25, 10]):
        counts = Counter(word for pair in pairs for word in set(words_of(pair[language])))
        assert 250 <= len(counts) <= 500
        word, count = counts.most_common()[-1]
        assert count >= fewest, f"{word} comes {count} times"


def test_no_noun_is_left_out(pairs):
    english = {word for pair in pairs for word in re.findall(r"\w+", pair[0].lower())}
    italian = {word for pair in pairs for word in re.findall(r"\w+", pair[1].lower())}
    for noun in ALL_NOUNS:
        assert {noun.english, noun.english_plural} - {"-"} <= english
        assert noun.italian in italian
        assert noun.english_plural == "-" or noun.italian_plural in italian


def test_short_and_long_sentences(pairs):
    lengths = Counter(len(english.split()) for english, _ in pairs)
    assert min(lengths) == 3 and max(lengths) == 14
    assert all(lengths[length] > 100 for length in range(3, 15))


def test_nobody_is_stanco_or_stanca_without_being_named(pairs):
    said = re.compile(r"(?:I am|You are|We are|They are) (?:very )?(\w+)\.")
    said = {match[1] for english, _ in pairs if (match := said.fullmatch(english))}
    same_for_all = {"kind", "strong", "young", "happy", "sad", "hungry", "thirsty", "cold", "hot"}
    assert said and said <= same_for_all


def test_punctuation(pairs):
    for english, italian in pairs:
        for text in (english, italian):
            assert re.fullmatch(r"[A-ZÈ][\w' ]*[.?]", text) and "  " not in text, text
        assert english[-1] == italian[-1]
        assert "' " not in italian, "an apostrophe stands beside its noun"


@pytest.mark.parametrize(
    ("word", "singular", "plural"),
    [
        ("dog", "il cane, un cane, questo cane, quel cane", "i cani, quei cani, tutti i cani"),
        ("friend", "l'amico, un amico, quest'amico, quell'amico", "gli amici, quegli amici"),
        ("student", "lo studente, uno studente, quello studente", "gli studenti, quegli studenti"),
        ("mirror", "lo specchio, uno specchio", "gli specchi, quegli specchi, tutti gli specchi"),
        ("backpack", "lo zaino, uno zaino, questo zaino", "gli zaini, quegli zaini, questi zaini"),
        (
            "orange",
            "l'arancia, un'arancia, quest'arancia",
            "le arance, quelle arance, tutte le arance",
        ),
        ("egg", "l'uovo, un uovo, quell'uovo", "le uova, quelle uova, molte uova"),
        ("hospital", "l'ospedale, un ospedale, quell'ospedale", ""),
        ("man", "l'uomo, un uomo", "gli uomini"),
        ("doctor", "il medico", "i medici"),
        ("park", "il parco", "i parchi"),
        ("uncle", "mio zio, nostro zio, lo zio", "i miei zii, gli zii, alcuni zii"),
        ("sister", "mia sorella, tua sorella", "le mie sorelle, le tue sorelle"),
        ("teacher", "la mia maestra, la nostra maestra", "le nostre maestre, alcune maestre"),
        ("city", "la città, una città, quella città", "le città, molte città"),
        ("photo", "la foto, una foto", "le foto, due foto"),
        ("watch", "l'orologio, il tuo orologio, ogni orologio", "gli orologi, i tuoi orologi"),
        ("water", "l'acqua, dell'acqua", ""),
        ("coffee", "il caffè, del caffè", ""),
        ("milk", "il latte, del latte", ""),
    ],
)
def test_articles_and_plurals(word, singular, plural):
    (noun,) = find_nouns(word)
    for table, is_plural, forms in ((SINGULAR, False, singular), (PLURAL, True, plural)):
        made = {noun_phrase(noun, english, is_plural).italian for english in table if forms}
        assert {form for form in forms.split(", ") if form} <= made


@pytest.mark.parametrize(
    ("preposition", "contracted"),
    [
        ("a", "al cane, allo zoo, all'uomo, alla casa, all'acqua, ai cani, agli zii, alle case"),
        ("da", "dal cane, dallo zoo, dall'uomo, dalla casa, dall'acqua, dai cani, dagli zii"),
        ("di", "del cane, dello zoo, dell'uomo, della casa, dell'acqua, dei cani, degli zii"),
        ("in", "nel cane, nello zoo, nell'uomo, nella casa, nell'acqua, nei cani, negli zii"),
        ("su", "sul cane, sullo zoo, sull'uomo, sulla casa, sull'acqua, sui cani, sugli zii"),
        ("davanti a", "davanti al cane, davanti allo zoo, davanti all'uomo, davanti alla casa"),
        ("sotto", "sotto il cane, sotto lo zoo, sotto l'uomo, sotto la casa, sotto l'acqua"),
    ],
)
def test_prepositions_contract(preposition, contracted):
    phrases = "il cane, lo zoo, l'uomo, la casa, l'acqua, i cani, gli zii, le case".split(", ")
    for phrase, expected in zip(phrases, contracted.split(", "), strict=False):
        assert contract(preposition, phrase) == expected


def test_prepositions_stay_apart_from_other_words():
    assert contract("a", "una ragazza") == "a una ragazza"
    assert contract("a", "alcuni amici") == "ad alcuni amici"
    assert contract("di", "mia madre") == "di mia madre"
    assert contract("in", "il mio giardino") == "nel mio giardino"
    assert contract("su", "quest'albero") == "su quest'albero"


@pytest.mark.parametrize(
    "forms",
    [
        "essere: sono sei è siamo sono",
        "avere: ho hai ha abbiamo hanno",
        "mangiare: mangio mangi mangia mangiamo mangiano",
        "cercare: cerco cerchi cerca cerchiamo cercano",
        "leggere: leggo leggi legge leggiamo leggono",
        "conoscere: conosco conosci conosce conosciamo conoscono",
        "aprire: apro apri apre apriamo aprono",
        "pulire: pulisco pulisci pulisce puliamo puliscono",
        "bere: bevo bevi beve beviamo bevono",
        "andare: vado vai va andiamo vanno",
        "venire: vengo vieni viene veniamo vengono",
        "dare: do dai dà diamo danno",
        "potere: posso puoi può possiamo possono",
        "dovere: devo devi deve dobbiamo devono",
        "volere: voglio vuoi vuole vogliamo vogliono",
    ],
)
def test_verbs_are_conjugated(forms):
    infinitive, expected = forms.split(": ")
    persons = ("I", "you", "he", "we", "they")
    assert " ".join(conjugate(infinitive, person) for person in persons) == expected
    assert conjugate(infinitive, "she") == conjugate(infinitive, "he")


def test_past_forms():
    entries = ["eat/ate = mangiare", "see/saw = vedere/visto", "wait for = aspettare"]
    entries += ["close = chiudere/chiuso", "clean = pulire", "sell/sold = vendere"]
    assert [parse_verb(entry)[1:] for entry in entries] == [
        ("ate", "mangiare", "mangiato"),
        ("saw", "vedere", "visto"),
        ("waited for", "aspettare", "aspettato"),
        ("closed", "chiudere", "chiuso"),
        ("cleaned", "pulire", "pulito"),
        ("sold", "vendere", "venduto"),
    ]


def test_adjectives_agree():
    forms = {
        "rosso": "rosso rossa rossi rosse",
        "bianco": "bianco bianca bianchi bianche",
        "lungo": "lungo lunga lunghi lunghe",
        "vecchio": "vecchio vecchia vecchi vecchie",
        "verde": "verde verde verdi verdi",
        "blu": "blu blu blu blu",
    }
    for adjective, expected in forms.items():
        made = [agree(adjective, fem, plural) for plural in (False, True) for fem in (False, True)]
        assert " ".join(made) == expected


def test_english_endings():
    words = "key city watch go have wash play box close"
    expected = "keys cities watches goes has washes plays boxes closes"
    assert " ".join(map(add_s, words.split())) == expected
    plurals = {noun.english: noun.english_plural for noun in ALL_NOUNS}
    expected = ["men", "women", "children", "mice", "knives"]
    assert [plurals[word] for word in "man woman child mouse knife".split()] == expected


def test_noun_phrases():
    apple, girls = find_nouns("apple")[0], noun_phrase(find_nouns("girl")[0], "the", plural=True)
    children = noun_phrase(find_nouns("child")[0], "these", plural=True)
    old, red = both("old = vecchio"), both("red = rosso")
    made = [
        noun_phrase(apple, "a"),
        noun_phrase(apple, "a", adjective=red),
        noun_phrase(find_nouns("house")[0], "a", adjective=old),
        noun_phrase(find_nouns("house")[0], owner=girls),
        noun_phrase(find_nouns("egg")[0], plural=True, adjective=old, owner=children),
    ]
    assert [phrase[:2] for phrase in made] == [
        ("an apple", "una mela"),
        ("a red apple", "una mela rossa"),
        ("an old house", "una casa vecchia"),
        ("the girls' house", "la casa delle ragazze"),
        ("these children's old eggs", "le uova vecchie di questi bambini"),
    ]


@pytest.mark.parametrize(
    ("tense", "mood", "english", "italian"),
    [
        ("present", "statement", "she looks for", "lei cerca"),
        ("present", "negative", "she does not look for", "lei non cerca"),
        ("present", "question", "Does she look for", "lei cerca"),
        ("past", "statement", "she looked for", "lei ha cercato"),
        ("past", "negative", "she did not look for", "lei non ha cercato"),
        ("past", "question", "Did she look for", "lei ha cercato"),
        ("can", "negative", "she cannot look for", "lei non può cercare"),
        ("must", "statement", "she must look for", "lei deve cercare"),
        ("want", "statement", "she wants to look for", "lei vuole cercare"),
        ("want", "question", "Does she want to look for", "lei vuole cercare"),
    ],
)
def test_clauses(tense, mood, english, italian):
    she, look = Phrase("she", "lei", "she"), parse_verb("look for = cercare")
    assert clause(she, look, tense, mood)[:2] == (english, italian)


def test_clauses_of_to_be_and_never():
    we, look = Phrase("we", "", "we"), parse_verb("look for = cercare")
    assert clause(we, look, adverb=NEVER)[:2] == ("we never look for", "non cerchiamo mai")
    assert clause(we, look, mood="negative", adverb=NEVER)[0] == "we never look for"
    assert clause(we, BE, mood="negative")[:2] == ("we are not", "non siamo")
    assert clause(we, BE, mood="question")[:2] == ("Are we", "siamo")


def test_some_pairs(pairs):
    lines = [line.strip() for line in SOME.strip().splitlines()]
    expected = dict(zip(lines[::2], lines[1::2], strict=True))
    translations = dict(pairs)
    assert {english: translations.get(english) for english in expected} == expected
