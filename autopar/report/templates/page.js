"use strict";
// Trees: fold and unfold all, and show only the lines that hold a word, with the modules around them.
for (const section of document.querySelectorAll("[data-tree]")) {
  const tree = section.querySelector(".tree");
  const found = section.querySelector("output");
  const setAll = (open) => tree.querySelectorAll("details").forEach((d) => { d.open = open; });
  section.querySelector("[data-unfold]").addEventListener("click", () => setAll(true));
  section.querySelector("[data-fold]").addEventListener("click", () => setAll(false));
  section.querySelector("input").addEventListener("input", (event) => {
    const word = event.target.value.trim().toLowerCase();
    let count = 0;
    const show = (item, whole) => {
      const row = item.matches("details") ? item.querySelector(":scope > summary .name") : item.querySelector(".name");
      const here = whole || row.textContent.toLowerCase().includes(word);
      let below = false;
      for (const child of item.querySelectorAll(":scope > details, :scope > .leaf")) below = show(child, here) || below;
      const kept = here || below;
      item.classList.toggle("away", !kept);
      if (kept && item.matches("details") && word) item.open = true;
      if (here) count += 1;
      return kept;
    };
    for (const item of tree.querySelectorAll(":scope > details, :scope > .leaf")) show(item, false);
    found.textContent = word ? `${count} lines` : "";
  });
}
// On paper everything is unfolded.
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  folded.forEach((d) => { d.open = true; });
});
addEventListener("afterprint", () => folded.forEach((d) => { d.open = false; }));
