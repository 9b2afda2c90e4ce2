"""Build the picture set that the wheel carries, from four icon sets and one list of English names.

The inputs are npm packages, the renderer (resvg) and the WebP encoder come from PyPI; all are pinned. From the root of
the repository:

    npm install --prefix build/pictures --no-save --legacy-peer-deps \\
        @iconify-json/fluent-emoji@1.2.7 @iconify-json/fluent-emoji-flat@1.2.6 \\
        @iconify-json/noto@1.2.9 @iconify-json/twemoji@1.2.5 emojibase-data@17.0.0
    python -m pip install resvg-py==0.5.0 pillow==13.0.0 numpy==2.4.6
    python scripts/build_pictures.py build/pictures/node_modules

It writes `pictures.webps` and `pictures.json` into `src/maxdiffusion/data/builtin` and prints counts and checksums.
The same inputs give the same bytes, after a few minutes of one core. `--check` compares with what is there and writes
nothing.

How concepts are matched. A concept is an emoji of emojibase's list (base form, no skin tones) that all four sets draw.
Sets are asked by code point, through the `chars.json` that Iconify ships with each set, because the same emoji has
different icon names in different sets (`person-elf` and `elf`). The list of Fluent Emoji is empty; its icons are named
as in its flat twin. Matching by code point finds 1,594 concepts; matching by equal icon names would find 1,557 of them.

How pictures are stored. Each is 64 x 64 RGB on white. Every channel is rounded to a multiple of 3 (so nothing moves by
more than 1 of 255) and then stored as *lossless* WebP: the rounding saves one byte in six, and, unlike with lossy WebP,
no colour bleeds over the sharp edges that icons are made of. `pictures.webps` is those WebP files one after the other,
concept by concept in the order of `pictures.json`, within a concept in the order of `styles`; a WebP file states its
own length, so no table of offsets is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import resvg_py
from PIL import Image

SIZE = 64
ROUND_TO = 3
STYLES = {
    "fluent": "@iconify-json/fluent-emoji",
    "flat": "@iconify-json/fluent-emoji-flat",
    "noto": "@iconify-json/noto",
    "twemoji": "@iconify-json/twemoji",
}
NAMES = "emojibase-data"
VERSIONS = {
    "@iconify-json/fluent-emoji": "1.2.7",
    "@iconify-json/fluent-emoji-flat": "1.2.6",
    "@iconify-json/noto": "1.2.9",
    "@iconify-json/twemoji": "1.2.5",
    "emojibase-data": "17.0.0",
}
TARGET = Path(__file__).resolve().parent.parent / "src" / "maxdiffusion" / "data" / "builtin"

# Names that read better without an article: plurals, substances, activities, proper names, words on signs.
_BARE = """
    rolling on the floor laughing | star-struck | revolving hearts | two hearts | hundred points | dizzy |
    sweat droplets | dashing away | ZZZ | pinched fingers | crossed fingers | thumbs up | thumbs down |
    clapping hands | raising hands | heart hands | open hands | palms up together | folded hands | nail polish |
    flexed biceps | lungs | eyes | breast-feeding | Santa Claus | Mrs. Claus | Mx Claus | people with bunny ears |
    men with bunny ears | women with bunny ears | horse racing | people wrestling | men wrestling | women wrestling |
    busts in silhouette | people hugging | footprints | paw prints | coral | grapes | cherries | blueberries |
    garlic | broccoli | peanuts | beans | bread | baguette bread | flatbread | stuffed flatbread | pancakes | bacon |
    french fries | falafel | cooking | fondue | popcorn | butter | salt | canned food | cooked rice | curry rice |
    spaghetti | oden | sushi | fried shrimp | dango | soft ice cream | shaved ice | ice cream | candy | custard |
    sake | clinking beer mugs | clinking glasses | pouring liquid | bubble tea | mate | ice | chopsticks |
    mount fuji | camping | building construction | wood | houses | Tokyo tower | hot springs | construction |
    luggage | foggy | fog | fireworks | sparkles | Japanese dolls | admission tickets | tennis | bowling |
    field hockey | ice hockey | lacrosse | ping pong | badminton | skis | nesting dolls | flower playing cards |
    performing arts | thread | yarn | glasses | sunglasses | goggles | jeans | gloves | socks | briefs | shorts |
    woman's clothes | shopping bags | ballet shoes | prayer beads | musical notes | control knobs | maracas |
    film frames | books | bookmark tabs | money with wings | card index dividers | linked paperclips | scissors |
    locked | unlocked | locked with pen | locked with key | crossed swords | chains | dna | bubbles | soap | fire |
    potable water | non-potable water | passport control | customs | baggage claim | left luggage |
    children crossing | no entry | prohibited | no bicycles | no smoking | no littering | no pedestrians |
    no mobile phones | no one under eighteen | radioactive | biohazard | clockwise vertical arrows | om | Aries |
    Taurus | Gemini | Cancer | Leo | Virgo | Libra | Scorpio | Sagittarius | Capricorn | Aquarius | Pisces |
    Ophiuchus | antenna bars | wireless | vibration mode | multiply | plus | minus | divide | infinity |
    currency exchange | copyright | registered | input latin uppercase | input latin lowercase | input numbers |
    input symbols | input latin letters | information | crossed flags
"""
BARE = frozenset(" ".join(name.split()) for name in _BARE.split("|"))
DEFINITE = frozenset({"Statue of Liberty", "milky way", "kaaba"})
# The sound decides between "a" and "an", not the letter: spelt-out initials, "you-nicorn", "won-piece".
SOUNDS_LIKE_VOWEL = ("hourglass", "herb", "SOS", "NG", "x-ray")
SOUNDS_LIKE_CONSONANT = ("one-piece", "unicorn", "euro ", "ewe")


def read_json(root: Path, package: str, name: str) -> Any:
    """One JSON file of an installed npm package."""
    return json.loads((root / package / name).read_text(encoding="utf-8"))


def check_versions(root: Path) -> None:
    """Stop unless every package is there in the pinned version: other versions would give other pictures."""
    for package, wanted in VERSIONS.items():
        found = read_json(root, package, "package.json")["version"]
        if found != wanted:
            sys.exit(f"{package} is {found}, this script is for {wanted}; see the npm command in its docstring")


def plain(label: str) -> str:
    """The label with straight quotes and without accents, so that it can be typed on any keyboard."""
    for fancy, straight in {"’": "'", "“": '"', "”": '"', "ñ": "n"}.items():
        label = label.replace(fancy, straight)
    if not label.isascii():
        sys.exit(f"label {label!r} has characters that this script does not know how to simplify")
    return label


def with_article(words: str) -> str:
    """The words as one would say them in a sentence: `a fox`, `an owl`, `grapes`, `the milky way`."""
    if words in BARE or words.endswith(("o'clock", "-thirty")):
        return words
    if words in DEFINITE:
        return f"the {words}"
    first = words.split()[0]
    said_letter_by_letter = first.isupper() and len(first) <= 2  # as in "AB button"
    vowel = words[0] in "AEFHILMNORSX" if said_letter_by_letter else words[0].lower() in "aeiou"
    vowel = (vowel or words.startswith(SOUNDS_LIKE_VOWEL)) and not words.startswith(SOUNDS_LIKE_CONSONANT)
    return f"{'an' if vowel else 'a'} {words}"


def phrase(label: str) -> str:
    """The noun phrase that captions use: `man: blond hair` becomes `a man with blond hair`."""
    if ": " not in label:
        return with_article(label)
    subject, detail = label.split(": ", 1)
    if subject == "keycap":
        return f"a keycap {detail}"
    if detail == "facing right":
        return f"{with_article(subject)} facing right"
    if detail == "bald":
        return f"a bald {subject}"
    return f"{with_article(subject)} with {'a beard' if detail == 'beard' else detail}"


def find_concepts(root: Path) -> tuple[list[dict[str, str]], dict[str, list[str]], dict[str, Any]]:
    """The concepts that all four sets draw, in the order of emojibase.

    Returns:
        one row a concept (`name`, `phrase`, `code`), the icon names of each style in the same order, the icon sets.
    """
    sets = {style: read_json(root, package, "icons.json") for style, package in STYLES.items()}
    by_code = {style: read_json(root, package, "chars.json") for style, package in STYLES.items()}
    by_code["fluent"] = by_code["flat"]
    rows: list[dict[str, str]] = []
    icons: dict[str, list[str]] = {style: [] for style in STYLES}
    emojis = [emoji for emoji in read_json(root, NAMES, "en/data.json") if "order" in emoji]
    for emoji in sorted(emojis, key=lambda emoji: emoji["order"]):
        code = emoji["hexcode"].lower()
        found = {style: by_code[style].get(code) or by_code[style].get(code.replace("-fe0f", "")) for style in STYLES}
        if any(name not in sets[style]["icons"] for style, name in found.items()):
            continue
        name = plain(emoji["label"])
        rows.append({"name": name, "phrase": phrase(name), "code": code})
        for style, icon in found.items():
            icons[style].append(icon)
    return rows, icons, sets


def render(icon_set: dict[str, Any], name: str) -> Image.Image:
    """Draw one icon at 64 x 64 on white; icons that are not square are centred in a square."""
    icon = icon_set["icons"][name]
    width = icon.get("width", icon_set.get("width", 16))
    height = icon.get("height", icon_set.get("height", 16))
    side = max(width, height)
    left = icon.get("left", 0) - (side - width) / 2
    top = icon.get("top", 0) - (side - height) / 2
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{SIZE}" height="{SIZE}" viewBox="{left} {top} {side} {side}">{icon["body"]}</svg>'
    )
    png = resvg_py.svg_to_bytes(svg_string=svg, width=SIZE, height=SIZE, background="#ffffff", skip_system_fonts=True)
    pixels = np.asarray(Image.open(io.BytesIO(bytes(png))).convert("RGB"), dtype=np.uint16)
    if pixels.shape != (SIZE, SIZE, 3):
        sys.exit(f"icon {name!r} came out as {pixels.shape}")
    return Image.fromarray(((pixels + ROUND_TO // 2) // ROUND_TO * ROUND_TO).astype(np.uint8))


def encode(picture: Image.Image) -> bytes:
    """Lossless WebP, the smallest that the encoder finds."""
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", lossless=True, quality=100, method=6)
    data = buffer.getvalue()
    if data[:4] != b"RIFF" or int.from_bytes(data[4:8], "little") + 8 != len(data):
        sys.exit("the WebP encoder wrote a file that does not state its own length")
    return data


def build(root: Path) -> dict[str, bytes]:
    """All files of the picture set: name -> content."""
    check_versions(root)
    rows, icons, sets = find_concepts(root)
    blob = bytearray()
    for index in range(len(rows)):
        for style in STYLES:
            blob += encode(render(sets[style], icons[style][index]))
    sys.stdout.write(
        f"{len(rows)} concepts x {len(STYLES)} styles = {len(rows) * len(STYLES)} pictures of {SIZE} x {SIZE}\n"
    )
    head = {
        "size": SIZE,
        "styles": list(STYLES),
        "packages": VERSIONS,
        "pictures_sha256": hashlib.sha256(blob).hexdigest(),
    }
    lines = ",\n".join(json.dumps([row["name"], row["phrase"], row["code"]]) for row in rows)
    text = json.dumps(head, indent=1)[:-2] + ',\n "concepts": [\n' + lines + "\n]\n}\n"
    json.loads(text)
    return {"pictures.webps": bytes(blob), "pictures.json": text.encode()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the built-in picture set.")
    parser.add_argument("node_modules", type=Path, help="where npm installed the packages")
    parser.add_argument("--check", action="store_true", help="compare with the files there, write nothing")
    arguments = parser.parse_args()
    different = []
    for name, content in build(arguments.node_modules).items():
        sys.stdout.write(f"{name}: {len(content):,} bytes, sha256 {hashlib.sha256(content).hexdigest()}\n")
        if not arguments.check:
            TARGET.mkdir(parents=True, exist_ok=True)
            (TARGET / name).write_bytes(content)
        elif (TARGET / name).read_bytes() != content:
            different.append(name)
    if different:
        sys.exit(f"differs from what is in {TARGET.name}: {', '.join(different)}")


if __name__ == "__main__":
    main()
