// Elements made without markup: whatever a model wrote ends up in a text node, and nowhere else.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

// The categories that steer a terminal, turn the direction of writing, or show as nothing.
const INVISIBLE = /(?:\r\n?|(?![\n\t])[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}])/gu;

function written(character) {
  if (character.startsWith("\r")) return character === "\r\n" ? "\\r\n" : "\\r";
  if (character === "\x1b") return "\\x1b";
  const code = character.codePointAt(0);
  const digits = code.toString(16);
  if (code < 0x100) return `\\x${digits.padStart(2, "0")}`;
  return code < 0x10000 ? `\\u${digits.padStart(4, "0")}` : `\\U${digits.padStart(8, "0")}`;
}

// Text nodes, with each invisible character written out and set apart.
export function visible(text) {
  const nodes = [];
  let last = 0;
  for (const found of String(text).matchAll(INVISIBLE)) {
    if (found.index > last) nodes.push(text.slice(last, found.index));
    nodes.push(el("span", { class: "control" }, written(found[0])));
    last = found.index + found[0].length;
  }
  nodes.push(String(text).slice(last));
  return nodes;
}

// The same with one span of the text marked.
export function marked(text, span) {
  if (!span) return visible(text);
  const [begin, end] = span;
  const mark = el("mark", { title: "the answer that was read" }, visible(text.slice(begin, end)));
  return [...visible(text.slice(0, begin)), mark, ...visible(text.slice(end))];
}

export function number(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: Math.min(digits, 0) });
}

// One tooltip for the page, placed by what it explains.
export function tip(element, lines) {
  const box = document.getElementById("tip");
  const show = () => {
    box.replaceChildren(...lines.map((line) => el("div", {}, visible(line))));
    box.hidden = false;
    const at = element.getBoundingClientRect();
    const left = Math.min(window.innerWidth - box.offsetWidth - 8, Math.max(8, at.left + at.width / 2 - box.offsetWidth / 2));
    box.style.left = `${left}px`;
    box.style.top = `${at.top > box.offsetHeight + 12 ? at.top - box.offsetHeight - 8 : at.bottom + 8}px`;
  };
  const hide = () => (box.hidden = true);
  for (const name of ["mouseenter", "focus"]) element.addEventListener(name, show);
  for (const name of ["mouseleave", "blur"]) element.addEventListener(name, hide);
  return element;
}
