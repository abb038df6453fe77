// A pressed button sends its `data-index`. In a toolbar, only one button is reached with the Tab key: the one that had the
// focus last, at first the first one. Arrow keys, Home and End go from there to the others.
element.addEventListener('click', (event) => {
    const button = event.target.closest('button[data-index]');
    if (button) trigger('click', {index: Number(button.dataset.index)});
});

// A restored page asks the question again whose answer was interrupted.
watch('value', () => element.querySelector('[data-is-pressed]')?.click());

const buttonsAround = (button) => Array.from(button.closest('[role=toolbar]')?.querySelectorAll('button') ?? []);

element.addEventListener('focusin', (event) => {
    for (const button of buttonsAround(event.target)) button.tabIndex = button === event.target ? 0 : -1;
});
element.addEventListener('keydown', (event) => {
    const buttons = buttonsAround(event.target);
    const index = buttons.indexOf(event.target);
    if (index < 0) return;
    const columns = buttons.filter((button) => button.offsetTop === buttons[0].offsetTop).length;
    const steps = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -index, End: buttons.length - 1 - index};
    if (!(event.key in steps)) return;
    event.preventDefault(); // the page would scroll
    buttons[index + steps[event.key]]?.focus();
});
