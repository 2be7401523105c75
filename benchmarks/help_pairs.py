"""Write sentence pairs for train_translation.py from the pages of LibreOffice's help.

They are the same files in each language, and a paragraph has the same id in all of them. They
come as packages without a hub (Debian: libreoffice-help-en-us, libreoffice-help-it), under MPL 2.0.

Run:  python benchmarks/help_pairs.py /usr/share/libreoffice/help/{en-US,it}
      python train_translation.py --dataset help.tsv
"""

import argparse
import csv
from html.parser import HTMLParser
from pathlib import Path

PARAGRAPHS = ("p", "h1", "h2", "h3", "h4", "h5", "h6")


class Paragraphs(HTMLParser):
    """The texts of a page by the ids of their paragraphs, without what is hidden."""

    def __init__(self):
        super().__init__()
        self.texts, self.id, self.hidden = {}, None, 0

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag in PARAGRAPHS:
            self.id = attributes.get("id")
        elif tag == "span" and (self.hidden or "hidden" in attributes):
            self.hidden += 1

    def handle_endtag(self, tag):
        if tag in PARAGRAPHS:
            self.id = None
        elif tag == "span" and self.hidden:
            self.hidden -= 1

    def handle_data(self, text):
        if self.id and not self.hidden:
            self.texts[self.id] = self.texts.get(self.id, "") + text


def read_page(path: Path) -> dict[str, str]:
    parser = Paragraphs()
    parser.feed(path.read_text(encoding="utf-8"))
    return {key: " ".join(text.split()) for key, text in parser.texts.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="folder of pages, named as its language")
    parser.add_argument("target", type=Path)
    parser.add_argument("--output", type=Path, default=Path("help.tsv"))
    args = parser.parse_args()
    pairs = {}
    for path in sorted(args.source.rglob("*.html")):
        other = args.target / path.relative_to(args.source)
        source, target = read_page(path), read_page(other) if other.exists() else {}
        for key in source.keys() & target.keys():
            pair = source[key], target[key]
            # Names of functions and what nobody has translated are the same in both languages.
            if all(pair) and source[key] != target[key]:
                pairs[pair] = None
    with open(args.output, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, "excel-tab", quoting=csv.QUOTE_NONE, quotechar=None)
        writer.writerow(path.name.partition("-")[0] for path in (args.source, args.target))
        writer.writerows(sorted(pairs))
    print(f"{len(pairs):,} pairs in {args.output}")


if __name__ == "__main__":
    main()
