
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;

  // Everything that is shown is made here, as text: a record's content never becomes markup.
  function make(tag, text, attributes) {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
    return node;
  }

  // Theme: the system's until the button is pressed. A file may have no storage; then the choice lasts as long as the page.
  const theme = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  function stored(value) {
    try {
      if (value !== undefined) localStorage.setItem("mae_bench-theme", value);
      return localStorage.getItem("mae_bench-theme");
    } catch (error) {
      return null;
    }
  }
  function dark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
  }
  function label() {
    theme.textContent = dark() ? "Light theme" : "Dark theme";
  }
  if (["light", "dark"].includes(stored())) root.dataset.theme = stored();
  theme.hidden = false;
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    stored(root.dataset.theme);
    label();
  });
  system.addEventListener("change", label);
  label();

  // Tables: sort by the buttons of the head, filter by the tools above.
  function compare(first, second) {
    const [a, b] = [first.key, second.key];
    if (a.number !== null && b.number !== null) return a.number - b.number;
    if (a.number !== null || b.number !== null) return a.number !== null ? -1 : 1;
    return a.text < b.text ? -1 : a.text > b.text ? 1 : 0;
  }
  function key(cell, numeric) {
    const number = cell.hasAttribute("data-sort") ? Number(cell.dataset.sort) : null;
    return { number: numeric ? number : null, text: cell.textContent.trim().toLowerCase(), known: !numeric || number !== null };
  }
  function sortable(table, say) {
    const body = table.tBodies[0];
    const original = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const name = head.textContent.trim();
      const button = make("button", name, { type: "button" });
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const order = { ascending: "descending", descending: "none" }[head.getAttribute("aria-sort")] || "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        let rows = original;
        if (order !== "none") {
          head.setAttribute("aria-sort", order);
          const numeric = original.some((row) => row.cells[column].hasAttribute("data-sort"));
          const keyed = original.map((row) => ({ row, key: key(row.cells[column], numeric) }));
          const sign = order === "ascending" ? 1 : -1;
          keyed.sort((a, b) => (b.key.known - a.key.known) || sign * compare(a, b)); // what has no number stays last
          rows = keyed.map((one) => one.row);
        }
        body.append(...rows);
        say(order === "none" ? "in the original order" : `sorted by ${name}, ${order}`);
      });
    });
  }
  for (const tool of document.querySelectorAll(".tool")) {
    const table = document.getElementById(tool.dataset.for);
    const output = tool.querySelector("output");
    const rows = [...table.tBodies[0].rows];
    const filters = [...tool.querySelectorAll("[data-filter]")];
    const words = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
    let last = "";
    function say(text) {
      last = text;
      const shown = rows.filter((row) => !row.hidden).length;
      output.textContent = (shown === rows.length ? `${shown} rows` : `${shown} of ${rows.length} rows`) + (last ? `, ${last}` : "");
    }
    function filter() {
      for (const row of rows) {
        row.hidden = !filters.every((one) => {
          if (!one.value) return true;
          if (one.dataset.filter !== "text") return row.dataset[one.dataset.filter] === one.value;
          return one.value.toLowerCase().split(/\s+/).every((word) => words.get(row).includes(word));
        });
      }
      say(last);
    }
    for (const one of filters) for (const kind of ["input", "change"]) one.addEventListener(kind, filter);
    tool.hidden = false;
    sortable(table, say);
    say("");
  }

  // Records: an address that ends in #run-… opens one.
  const dialog = document.getElementById("record");
  const body = document.getElementById("record-body");
  function pairs(rows) {
    const list = make("dl");
    for (const [name, value] of rows) list.append(make("dt", name), make("dd", value));
    return list;
  }
  function table(caption, heads, rows) {
    const box = make("div", undefined, { class: "scroll", role: "region", tabindex: "0", "aria-label": caption });
    const made = make("table");
    made.append(make("caption", caption, { class: "unseen" }));
    const head = made.createTHead().insertRow();
    heads.forEach((name, i) => head.append(make("th", name, i ? { scope: "col", class: "number" } : { scope: "col" })));
    const inner = made.createTBody();
    for (const row of rows) {
      const line = inner.insertRow();
      row.forEach((text, i) => line.append(i ? make("td", text || "–", { class: "number" }) : make("th", text, { scope: "row" })));
    }
    box.append(made);
    return box;
  }
  function command(text, exact) {
    const box = make("div", undefined, { class: "command" });
    const code = make("code", text);
    box.append(code);
    if (!exact) return [box, make("p", "Not to be copied: it holds characters that are not shown, or is cut off.", { class: "fine" })];
    const button = make("button", "Copy", { type: "button", "aria-live": "polite" });
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch (error) {
        getSelection().selectAllChildren(code);
        button.textContent = "Selected: press Ctrl+C";
      }
    });
    box.append(button);
    return [box];
  }
  function folded(name, content) {
    const box = make("details");
    box.append(make("summary", name), content);
    return box;
  }
  function fill(anchor, run) {
    document.getElementById("record-title").textContent = run.title;
    const parts = [make("p", run.what)];
    const seeds = make("nav", undefined, { class: "seeds", "aria-label": "Runs of this cell" });
    for (const [other, seed] of run.siblings) {
      seeds.append(make("a", `seed ${seed}`, { href: `#${other}`, ...(other === anchor ? { "aria-current": "true" } : {}) }));
    }
    if (run.curve) seeds.append(make("a", "training curves", { href: `#${run.curve}` }));
    parts.push(seeds, make("h3", "Command"), ...command(run.command, run.exact));
    if (run.notes.length) {
      const list = make("ul");
      run.notes.forEach((note) => list.append(make("li", note)));
      parts.push(make("h3", "Notes of the run"), list);
    }
    parts.push(make("h3", "Metrics"), table("Metrics", ["metric", "last step", "best of all evaluations", "trivial prediction"], run.metrics));
    for (const [name, rows] of Object.entries(run.facts)) parts.push(make("h3", name[0].toUpperCase() + name.slice(1)), pairs(rows));
    if (run.classes.rows.length) {
      const more = run.classes.more ? `, the highest and the lowest; ${run.classes.more} more are in the record` : "";
      parts.push(make("h3", "Per class"), folded(`${run.classes.rows.length} classes${more}`, table("Per class", ["class", ...run.classes.names], run.classes.rows)));
    }
    const recipe = data.recipes[run.recipe] || [];
    if (recipe.length) parts.push(make("h3", "Recipe"), folded(`${recipe.length} values with their sources`, table("Recipe", ["key", "value", "source"], recipe)));
    body.replaceChildren(...parts);
  }
  function known(anchor) {
    return Object.hasOwn(data.runs, anchor);
  }
  function follow() {
    const anchor = decodeURIComponent(location.hash.slice(1));
    if (!known(anchor)) {
      if (dialog.open) dialog.close();
      return;
    }
    fill(anchor, data.runs[anchor]);
    if (!dialog.open) dialog.showModal();
    dialog.scrollTop = 0;
    document.getElementById("record-title").focus();
  }
  let opener = null;
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#']");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    const anchor = decodeURIComponent(link.hash.slice(1));
    if (known(anchor)) {
      event.preventDefault(); // the page stays where it is, below the record
      if (!dialog.contains(link)) opener = link;
      history.pushState(null, "", link.hash);
      follow();
    } else if (dialog.contains(link)) {
      opener = null;
      dialog.close();
    }
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close(); // the backdrop
  });
  document.getElementById("close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    if (known(decodeURIComponent(location.hash.slice(1)))) history.replaceState(null, "", location.href.split("#")[0]);
    if (opener) opener.focus();
  });
  window.addEventListener("hashchange", follow);
  window.addEventListener("popstate", follow);
  follow();
})();
