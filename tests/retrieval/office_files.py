"""Small .pdf and .docx files, made on the spot."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import docx
from docx.oxml import OxmlElement
from pypdf import PdfWriter

LINE = 14  # points


def pdf_bytes(*pages: Sequence[str], place: str = "72 760 Td", size: int = 11) -> bytes:
    """A PDF whose pages show these lines from a place; a line that begins with "# " has letters of 16, without the mark."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "", "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for lines in pages:
        escaped = (line.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)") for line in lines)
        shown = f"BT /F1 {size} Tf {place} 14 TL " + " ".join(_shown(line, size) for line in escaped) + " ET"
        kids.append(f"{len(objects) + 1} 0 R")
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {len(objects) + 2} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(shown.encode('latin-1'))} >>\nstream\n{shown}\nendstream")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    written, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(written))
        written += f"{number} 0 obj\n{content}\nendobj\n".encode("latin-1")
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    trailer = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(written)}\n%%EOF\n"
    return written + f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{trailer}".encode("latin-1")


def _shown(line: str, size: int) -> str:
    return f"/F1 16 Tf ({line[2:]}) Tj T* /F1 {size} Tf" if line.startswith("# ") else f"({line}) Tj T*"


def write_pdf(
    path: Path, *pages: Sequence[str], title: str = "", outline: Sequence[tuple[str, int]] = (), password: str = ""
) -> Path:
    """`outline`: titles with the number of their page, each one level below the one before."""
    writer = PdfWriter(clone_from=io.BytesIO(pdf_bytes(*pages)))
    if title:
        writer.add_metadata({"/Title": title})
    above = None
    for name, page in outline:
        above = writer.add_outline_item(title=name, page_number=page, parent=above)
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    writer.write(path)
    return path


def write_docx(path: Path) -> Path:
    document = docx.Document()
    document.add_heading("The manual", 0)
    document.add_heading("Install", 1)
    document.add_paragraph("Run the installer. Then restart.")
    document.add_paragraph("one disk", style="List Bullet")
    document.add_paragraph("two hands", style="List Bullet")
    table = document.add_table(2, 2)
    for cell, text in zip(
        (cell for row in table.rows for cell in row.cells), ("Part", "Weight", "Disk", "5 kg"), strict=True
    ):
        cell.text = text
    table.rows[0]._tr.get_or_add_trPr().append(OxmlElement("w:tblHeader"))
    document.add_heading("On Linux", 2)
    document.add_paragraph("Use the package.")
    document.save(str(path))
    return path
