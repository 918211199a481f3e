/* One item of each of many sequences of integers: see items.py, which also does it in Python.
 *
 * A scheduler's own Python has run since the sequences were read last, so that neither they nor their items are in the
 * processor's caches. All of them are sent for first, and read when they are there.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define SEND_FOR(address) __builtin_prefetch(address)
#else
#define SEND_FOR(address) ((void)(address))
#endif

typedef struct {
    /* `array.array`, and whether its objects are as large as they have to be for `send_for_items`. */
    PyObject *array;
    int sends_for_items;
} State;

/* Send for the item of an array at a place from its front.
 *
 * Where its items lie stands behind its head. Nothing is read from there: were it otherwise, only time would be lost.
 */
static void
send_for_item(PyObject *array, int64_t place)
{
    const char *items = *(const char **)((const char *)array + sizeof(PyVarObject));
    SEND_FOR((const void *)((uintptr_t)items + (uintptr_t)place * sizeof(int64_t)));
}

/* Put a place that counts from behind, if it does, where it is from the front; return whether there is such a place. */
static int
is_inside(int64_t *place, Py_ssize_t length)
{
    if (*place < 0) {
        *place += length;
    }
    return *place >= 0 && *place < length;
}

/* Read an item of a sequence of any kind; return 1, 0 where there is none at this place, and -1 with an exception. */
static int
read_item(PyObject *sequence, int64_t place, int64_t *value)
{
    Py_ssize_t length = PySequence_Size(sequence);
    if (length < 0) {
        return -1;
    }
    if (!is_inside(&place, length)) {
        return 0;
    }
    PyObject *item = PySequence_GetItem(sequence, (Py_ssize_t)place);
    if (item == NULL) {
        return -1;
    }
    *value = PyLong_AsLongLong(item);
    Py_DECREF(item);
    return *value == -1 && PyErr_Occurred() ? -1 : 1;
}

/* As `read_item`, of an array. */
static int
read_item_of_array(PyObject *array, int64_t place, int64_t *value)
{
    Py_buffer view;
    if (PyObject_GetBuffer(array, &view, PyBUF_FORMAT) < 0) {
        return -1;
    }
    int found = -1;
    if (view.itemsize == sizeof(int64_t) && view.format != NULL && strchr("ql", view.format[0]) != NULL) {
        found = is_inside(&place, view.len / view.itemsize);
        if (found) {
            memcpy(value, (const char *)view.buf + place * sizeof(int64_t), sizeof(int64_t));
        }
    }
    PyBuffer_Release(&view);
    return found < 0 ? read_item(array, place, value) : found;
}

static int
take_all(State *state, PyObject *sequences, Py_ssize_t count, const int64_t *places, int64_t *found)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        SEND_FOR(PyList_GetItem(sequences, i));
    }
    for (Py_ssize_t i = 0; state->sends_for_items && i < count; i++) {
        PyObject *sequence = PyList_GetItem(sequences, i);
        if ((PyObject *)Py_TYPE(sequence) == state->array) {
            send_for_item(sequence, places[i]);
        }
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        /* A sequence's own Python may run, and change the list. */
        PyObject *sequence = PyList_GetItem(sequences, i);
        if (sequence == NULL) {
            return -1;
        }
        Py_INCREF(sequence);
        int is_array = (PyObject *)Py_TYPE(sequence) == state->array;
        int is_there = (is_array ? read_item_of_array : read_item)(sequence, places[i], &found[i]);
        Py_DECREF(sequence);
        if (is_there != 1) {
            return is_there;
        }
    }
    return 1;
}

static PyObject *
take(PyObject *module, PyObject *args)
{
    PyObject *sequences, *result = NULL;
    Py_buffer places, found;
    if (!PyArg_ParseTuple(args, "Oy*w*:take", &sequences, &places, &found)) {
        return NULL;
    }
    Py_ssize_t count = PyList_Check(sequences) ? PyList_Size(sequences) : -1;
    Py_ssize_t bytes = count * (Py_ssize_t)sizeof(int64_t);
    if (count < 0 || places.len != bytes || found.len != bytes) {
        PyErr_SetString(PyExc_ValueError, "kv-canary: items: sequences must be a list, with an int64 place for each");
    }
    else {
        int is_there = take_all(PyModule_GetState(module), sequences, count, places.buf, found.buf);
        result = is_there < 0 ? NULL : PyBool_FromLong(is_there);
    }
    PyBuffer_Release(&places);
    PyBuffer_Release(&found);
    return result;
}

static PyMethodDef methods[] = {
    {"take", take, METH_VARARGS,
     "take(sequences, places, found)\n--\n\n"
     "Put the item at a place of each sequence into `found`; return False where there is none at one of them."},
    {NULL, NULL, 0, NULL},
};

static int
begin(PyObject *module)
{
    State *state = PyModule_GetState(module);
    PyObject *arrays = PyImport_ImportModule("array");
    if (arrays == NULL) {
        return -1;
    }
    state->array = PyObject_GetAttrString(arrays, "array");
    Py_DECREF(arrays);
    PyObject *size = state->array == NULL ? NULL : PyObject_GetAttrString(state->array, "__basicsize__");
    if (size == NULL) {
        return -1;
    }
    state->sends_for_items = PyLong_AsLong(size) >= (long)(sizeof(PyVarObject) + sizeof(char *));
    Py_DECREF(size);
    return PyErr_Occurred() ? -1 : 0;
}

static int
visit(PyObject *module, visitproc visit, void *arg)
{
    State *state = PyModule_GetState(module);
    if (state != NULL) {
        Py_VISIT(state->array);
    }
    return 0;
}

static int
clear(PyObject *module)
{
    State *state = PyModule_GetState(module);
    if (state != NULL) {
        Py_CLEAR(state->array);
    }
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, begin},
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_items",
    .m_doc = "One item of each of many sequences of integers.",
    .m_size = sizeof(State),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = visit,
    .m_clear = clear,
};

PyMODINIT_FUNC
PyInit__items(void)
{
    return PyModuleDef_Init(&definition);
}
