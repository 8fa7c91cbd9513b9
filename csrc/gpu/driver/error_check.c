#include "gpu/driver/error_check.h"

rf_status rf__cuda_check_word(const rf__cuda_device *device, rf__cuda_error_word word, void *stream) {
    rf_status status = RF_OK;
    rf__cu_capture_status capturing = RF__CU_STREAM_CAPTURE_STATUS_NONE;
    if (!rf__cuda_error_is_left(word)) return RF_OK;
    RF_CHECK(rf__cuda_enter(device));
    /* Also fails if the driver refuses a query of the default stream because another stream is captured. */
    if (device->driver->cuStreamIsCapturing(stream, &capturing) == RF__CU_SUCCESS &&
        capturing == RF__CU_STREAM_CAPTURE_STATUS_NONE)
        status = rf__cuda_error_raise(word);
    return rf__cuda_leave_with(status);
}

rf_status rf_cuda_check(int32_t device_ordinal) {
    const rf__cuda_device *device = NULL;
    RF_CHECK(rf__cuda_device_get(device_ordinal, &device));
    RF_CHECK(rf__cuda_enter(device));
    RF_CHECK(rf__cuda_leave_with(RF__CUDA_CALL(device->driver->cuCtxSynchronize())));
    return rf__cuda_errors_raise(&device->errors);
}
