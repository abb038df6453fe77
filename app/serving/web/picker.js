// Files are chosen, dropped, pasted or photographed here, and uploaded. Gradio's components remove the present value
// before a new one is known to be good, and show no percentage.
//
// A choice changes nothing by itself: the event `upload` names the uploaded files, and the server's answer shows what
// was taken. Presses of the buttons in `holds` wait for it.
const root = () => element.querySelector('.la-picker');
const {holds, enter, replaces, notes, waits, unsent, maxBytes, maxFiles} = root().dataset;
const news = element.parentNode.insertBefore(document.createElement('div'), element.nextSibling);
const note = document.createElement('p');
let request = null; // the upload under way
let isWaiting = false; // from a choice until the server's answer
let held = null; // the text of the button that was pressed meanwhile

news.className = 'la-upload';
note.className = 'la-note';
note.setAttribute('role', 'status');

function tell(text, {role = 'status', more = []} = {}) {
    const line = document.createElement('p');
    line.setAttribute('role', role);
    line.className = role === 'alert' ? 'la-problem' : 'la-note';
    line.textContent = text;
    news.replaceChildren(...(text ? [line, ...more] : []));
    root().classList.toggle('is-outdated', text !== '');
    root().classList.toggle('is-uploading', isWaiting);
    const notice = document.querySelector(notes);
    if (!notice.contains(element)) notice.hidden = isWaiting; // it is about the time before
}

function refuse(problem) {
    request = null;
    isWaiting = false;
    tell(problem, {role: 'alert'});
    release(false);
}

function take(files, refused = []) {
    const chosen = files.slice(0, Number(maxFiles));
    const fitting = chosen.filter((file) => file.size <= Number(maxBytes));
    const large = chosen.filter((file) => file.size > Number(maxBytes));
    refused.push(...large.map((file) => `\`${file.name}\` has ${megabytes(file.size)}, and at most ${megabytes(maxBytes)} can be uploaded.`));
    if (chosen.length < files.length) refused.push(`${files.length - chosen.length} more files were left out: at most ${maxFiles} can be added at once.`);
    const send = (paths) => trigger('upload', {
        files: paths.map((path, index) => ({path, orig_name: fitting[index].webkitRelativePath || fitting[index].name})),
        refused: refused.slice(0, 20),
    });
    if (!fitting.length && !refused.length) return;
    request?.abort();
    request = null;
    isWaiting = true;
    if (!fitting.length) return send([]);

    const name = fitting.length === 1 ? fitting[0].name : `${fitting.length} files`;
    const total = fitting.reduce((sum, file) => sum + file.size, 1);
    const bar = Object.assign(document.createElement('progress'), {max: 100, value: 0});
    bar.setAttribute('aria-label', `Upload of ${name}`);
    const percent = document.createElement('strong');
    percent.textContent = '0%';
    const cancel = Object.assign(document.createElement('button'), {type: 'button', className: 'la-chip', textContent: 'Cancel'});
    cancel.addEventListener('click', () => { request.abort(); refuse('The upload was cancelled.'); });
    tell(`Uploading ${name}`, {more: [bar, percent, cancel]});
    const sendFrom = (begin, paths) => {
        if (begin >= fitting.length) {
            request = null;
            tell(`Reading ${name}`);
            return send(paths);
        }
        const part = fitting.slice(begin, begin + 1000); // the server takes this many files at once
        const sent = fitting.slice(0, begin).reduce((sum, file) => sum + file.size, 0);
        const form = new FormData();
        part.forEach((file) => form.append('files', file));
        const upload = request = new XMLHttpRequest();
        upload.upload.onprogress = (event) => {
            bar.value = Math.min(100, Math.floor((sent + event.loaded) / total * 100));
            percent.textContent = `${bar.value}%`;
        };
        upload.onerror = () => request === upload && refuse(`The connection ended while ${name} was uploaded. Choose it again.`);
        upload.onload = () => {
            if (request !== upload) return;
            if (upload.status !== 200) return refuse(`The server refused the upload of ${name} (status ${upload.status}).`);
            sendFrom(begin + part.length, [...paths, ...JSON.parse(upload.responseText)]);
        };
        upload.open('POST', 'gradio_api/upload');
        upload.send(form);
    };
    sendFrom(0, []);
}

function megabytes(bytes) {
    return `${(Number(bytes) / 1e6).toFixed(0)} MB`;
}

let isRemoving = false;
watch('value', () => { // the server's answer
    if (isRemoving) {
        const list = element.querySelector('details');
        if (list) list.open = true;
        if (document.activeElement === document.body) element.querySelector('input').focus();
    }
    isRemoving = false;
    if (request !== null) return root().classList.add('is-outdated', 'is-uploading'); // files were chosen again meanwhile
    isWaiting = false;
    tell('');
    setTimeout(() => release(root().dataset.taken === 'yes')); // when the page's other parts are updated, too
});

element.addEventListener('change', (event) => {
    take(Array.from(event.target.files));
    event.target.value = ''; // so that the same file can be chosen again
});
element.addEventListener('click', (event) => {
    const {action, index} = event.target.closest('button')?.dataset ?? {};
    if (action === 'paste') paste();
    if (action === 'camera') photograph();
    if (action === 'remove') {
        isRemoving = true;
        trigger('clear', {index: Number(index)});
    }
});

// Drop and Ctrl+V anywhere on the page

const brings = (transfer) => Array.from(transfer?.types ?? []).includes('Files');
const isSeen = () => element.offsetParent !== null;
for (const kind of ['dragenter', 'dragover', 'dragleave', 'drop']) {
    document.addEventListener(kind, (event) => {
        if (!brings(event.dataTransfer)) return;
        event.preventDefault(); // the browser would open the file in place of the page
        if (!isSeen()) return;
        root().classList.toggle('is-target', kind === 'dragover');
        if (kind !== 'drop') return;
        const items = Array.from(event.dataTransfer.items).filter((item) => item.kind === 'file');
        const files = items.filter((item) => !item.webkitGetAsEntry?.()?.isDirectory).map((item) => item.getAsFile());
        const folders = items.map((item) => item.webkitGetAsEntry?.()).filter((entry) => entry?.isDirectory);
        take(files, folders.map((entry) => `\`${entry.name}\` is a folder, and folders cannot be dropped.`));
    });
}

// Office programs copy a picture of the text, too. A copied picture may have HTML, but without text.
const isText = (data) => new DOMParser().parseFromString(data.getData('text/html'), 'text/html').body.textContent.trim() !== '';
const takesText = (target) => target.closest('textarea, input:not([type=range], [type=radio], [type=checkbox], [type=file])');
document.addEventListener('paste', (event) => {
    if (!isSeen() || !brings(event.clipboardData) || (takesText(event.target) && isText(event.clipboardData))) return;
    event.preventDefault();
    take(Array.from(event.clipboardData.files));
});

async function paste() {
    try {
        for (const item of await navigator.clipboard.read()) {
            const type = item.types.find((each) => each.startsWith('image/'));
            if (type) return take([new File([await item.getType(type)], `pasted.${type.slice(6)}`, {type})]);
        }
        tell('There is no picture in the clipboard.', {role: 'alert'});
    } catch {
        tell('The browser does not let this page read the clipboard. Press Ctrl+V.', {role: 'alert'});
    }
}

async function photograph() {
    const dialog = element.querySelector('dialog'), video = dialog.querySelector('video');
    const shutter = dialog.querySelector('[value=take]');
    shutter.disabled = true; // until there is something to take
    video.onloadeddata = () => { shutter.disabled = false; };
    try {
        video.srcObject = await navigator.mediaDevices.getUserMedia({video: {facingMode: 'environment'}});
    } catch {
        return tell('The browser gives this page no camera.', {role: 'alert'});
    }
    dialog.returnValue = '';
    dialog.onclose = () => {
        const [width, height] = [video.videoWidth, video.videoHeight];
        const canvas = Object.assign(document.createElement('canvas'), {width, height});
        canvas.getContext('2d').drawImage(video, 0, 0);
        video.srcObject.getTracks().forEach((track) => track.stop());
        if (dialog.returnValue === 'take' && width) canvas.toBlob((blob) => take([new File([blob], 'photo.png', {type: 'image/png'})]));
    };
    dialog.showModal();
    await video.play();
}

// Presses that wait for the upload

function hold(event, pressed) {
    note.remove();
    if (request === null && !(isWaiting && held === null)) return; // the second press is sent, whatever happened
    event.preventDefault();
    event.stopImmediatePropagation();
    held = pressed.textContent.trim();
    note.textContent = waits;
    document.querySelector(notes).after(note);
}

function release(isTaken) {
    const pressed = Array.from(document.querySelectorAll(holds)).find((each) => each.textContent.trim() === held);
    if (held === null) return;
    held = null;
    note.textContent = isTaken ? 'The suggested questions have changed. Press one again.' : unsent;
    if (isTaken && pressed) pressed.click();
}

document.addEventListener('click', (event) => {
    if (replaces && event.target.closest(replaces)) { // the later choice counts; its answer comes from the server
        request?.abort();
        request = null;
    }
    const pressed = event.target.closest(holds);
    if (pressed) hold(event, pressed);
}, true);
document.addEventListener('keydown', (event) => {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing || !(enter && event.target.closest(enter))) return;
    hold(event, document.querySelector(holds.split(',')[0]));
}, true);
