// Parts of a page that say so are asked for again, while somebody looks; what has the focus keeps it, and what was moved aside
// stays there. What is read out lies outside of such a part, and is changed where the words differ: put in anew it would be
// read out anew.
"use strict";
// Parts that the keyboard reaches and that are called as this one is: links by where they lead, since their words change.
const called = (part, node) => [...part.querySelectorAll("a, [tabindex]")].filter(
  other => other.getAttribute("href") === node.getAttribute("href") && (node.href || other.ariaLabel === node.ariaLabel));
for (const part of document.querySelectorAll("[data-fragment]")) {
  const every = 1000 * Number(part.dataset.every);
  const again = async () => {
    const busy = part.contains(document.activeElement) && document.activeElement.tagName === "INPUT";
    if (!document.hidden && !busy) {
      try {
        const answer = await fetch(part.dataset.fragment, { headers: { accept: "text/html" }, redirect: "error" });
        if (answer.status === 401) { location.reload(); return; }
        if (answer.ok) {
          const text = await answer.text();
          const held = document.activeElement;
          const at = part.contains(held) ? called(part, held).indexOf(held) : -1;
          const moved = [...part.querySelectorAll(".scroll")].map(part => part.scrollLeft);
          part.innerHTML = text;
          const spoken = document.getElementById(part.dataset.said);
          const words = part.querySelector("[data-says]")?.textContent;
          if (spoken && words !== undefined && spoken.textContent !== words) spoken.textContent = words;
          part.removeAttribute("data-stale");
          part.querySelectorAll(".scroll").forEach((box, place) => { box.scrollLeft = moved[place] ?? 0; });
          if (at >= 0) called(part, held)[at]?.focus({ preventScroll: true });
        }
      } catch {
        part.setAttribute("data-stale", "");
      }
    }
    setTimeout(again, every);
  };
  setTimeout(again, every);
}
