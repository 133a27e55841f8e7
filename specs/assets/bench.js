// Selects above each table that names its filters. Without this script every row is there all the same.
"use strict";
(() => {
  function setUp(table) {
    const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
    const rows = [...table.tBodies[0].rows];
    const box = document.createElement("div");
    const count = document.createElement("p");
    box.className = "filters";
    count.setAttribute("aria-live", "polite");

    const selects = table.dataset.filters.split(",").map((name) => {
      const column = heads.indexOf(name);
      const values = [...new Set(rows.map((row) => row.cells[column].textContent))];
      values.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
      const label = document.createElement("label");
      const select = document.createElement("select");
      select.name = name;
      select.append(new Option("all", ""), ...values.map((value) => new Option(value, value)));
      label.append(name, select);
      box.append(label);
      return { column, select };
    });

    function apply() {
      const active = selects.filter(({ select }) => select.value !== "");
      let shown = 0;
      for (const row of rows) {
        row.hidden = active.some(({ column, select }) => row.cells[column].textContent !== select.value);
        shown += !row.hidden;
      }
      count.textContent = `${shown} of ${rows.length} rows`;
    }

    const all = document.createElement("button");
    all.type = "button";
    all.className = "md-button";
    all.textContent = "Show all";
    all.addEventListener("click", () => {
      for (const { select } of selects) select.value = "";
      apply();
    });
    box.append(all);
    box.addEventListener("change", apply);
    table.closest(".scroll").before(box, count);
    apply();
    return { box, apply };
  }

  const tables = [...document.querySelectorAll("table[data-filters]")].map(setUp);

  // "All rows of <op>" opens the first table with that op chosen.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-op]");
    if (!link || !tables.length) return;
    const { box, apply } = tables[0];
    box.closest("details").open = true;
    box.querySelector('select[name="op"]').value = link.dataset.op;
    apply();
  });
})();
